"""`bench.two_gpus`: what it reads of the GPUs, and the daemon's configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import two_gpus
from kvd.config.config import load

pytestmark = pytest.mark.mlx

ANSWERS = {
    "--query-gpu=uuid,memory.used": "GPU-a, 6747\nGPU-b, 10679\n",
    "--query-compute-apps=gpu_uuid,pid,used_memory": "GPU-b, 17, 6528\nGPU-a, 15, 2302\n",
}


def test_memory_is_that_of_each_process_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=ANSWERS[command[1]])

    monkeypatch.setattr(two_gpus.subprocess, "run", run)
    assert two_gpus.memory_by_gpu() == [
        {"gpu": 0, "used_mib": 6747, "processes": [{"pid": 15, "mib": 2302}]},
        {"gpu": 1, "used_mib": 10679, "processes": [{"pid": 17, "mib": 6528}]},
    ]


def test_the_daemon_gets_two_models_and_a_gang(tmp_path: Path) -> None:
    two_gpus.write_config(tmp_path, Path("/model"))
    models = load(tmp_path / "config.toml").models
    assert [(one.alias, one.device, one.ranks) for one in models] == [
        ("first", 0, 1),
        ("second", 1, 1),
        ("both", 0, 2),
    ]
