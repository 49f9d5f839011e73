"""Two models and a gang on two GPUs under one daemon, with real processes and a stand-in driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import UnsupportedModel
from protocol.memory_bounds import HOST_BYTES
from protocol.policy import PolicyChange
from tests.process.helpers import source, wait_for

MIB = 2**20
BIG = source(tps=500, weights=500 * MIB)
BUDGET = 768 * MIB
"""Three quarters of the stand-in's 1 GiB."""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the daemon two GPUs, and MLX's CUDA build as installed."""
    library = tmp_path / "libnvidia-ml.so.1"
    code = Path(__file__).with_name("nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, code], check=True)
    about = tmp_path / "mlx_cuda_13-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0\n")
    monkeypatch.setenv("KVD_TEST_DEVICES", "2")
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        before = os.environ.get(name)
        monkeypatch.setenv(name, f"{tmp_path}:{before}" if before else str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def visible(pid: int) -> str:
    """Return the GPUs that a process may use."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(it.decode() for it in variables if it.startswith(b"CUDA_VISIBLE_DEVICES="))[21:]


@pytest.mark.usefixtures("two_gpus")
def test_two_models_on_two_gpus(make_daemon):
    daemon = make_daemon().start()
    with daemon.client() as client:
        one = client.load(BIG, alias="one").result
        two = client.load(BIG, alias="two", policy=PolicyChange(device=1)).result
        assert one.worker_pid is not None
        assert two.worker_pid is not None
        assert (visible(one.worker_pid), visible(two.worker_pid)) == ("0", "1")
        assert (one.device, two.device) == (0, 1)
        status = client.status()
        assert [it.budget_bytes for it in status.devices] == [BUDGET] * 2
        assert min(it.granted_bytes for it in status.devices) > 500 * MIB
        assert status.host_budget is not None
        assert status.host_budget.granted_bytes == 2 * HOST_BYTES
        text = client.generate("one", "hello", max_tokens=20).text
        assert client.generate("two", "hello", max_tokens=20).text == text

        done = daemon.kvctl("load", BIG, "--alias", "three", "--device", "1", "--json")
        assert json.loads(done.stdout)["device"] == 1
        assert [it.name for it in client.status().models] == ["one", "three"]
        evicted = [it for it in client.events() if it.kind == "evict"]
        assert [(it.model, it.numbers["device"]) for it in evicted] == [("two", 1)]
        with pytest.raises(UnsupportedModel, match="needs device 2"):
            client.load(BIG, alias="four", policy=PolicyChange(device=2)).result  # noqa: B018
        assert client.status().violations == 0
    assert "GPU 1" in daemon.kvctl("status").stdout
    sections = json.loads(daemon.kvctl("doctor", "--json").stdout)["sections"]
    findings = [it for section in sections for it in section["findings"]]
    (memory,) = [it for it in findings if it["name"] == "memory"]
    assert "budget 768 MiB on each of 2 GPUs" in memory["observed"]


@pytest.mark.usefixtures("two_gpus")
def test_a_gang_over_two_gpus_survives_a_kill_and_gives_both_back(make_daemon):
    daemon = make_daemon().start()
    with daemon.client() as client:
        alone = client.load(BIG, alias="one").result
        text = client.generate("one", "hello", max_tokens=300).text
        client.unload("one")
        assert alone.ranks == []
        wide = source(tps=200, weights=900 * MIB)  # more than one GPU's budget
        gang = client.load(wide, alias="gang", policy=PolicyChange(ranks=2)).result
        assert [visible(it.pid) for it in gang.ranks] == ["0", "1"]
        status = client.status()
        assert status.host_budget is not None
        assert status.host_budget.granted_bytes == 2 * HOST_BYTES
        granted = [it.granted_bytes for it in status.devices]
        assert granted[0] == granted[1] >= 450 * MIB
        stream = client.generate("gang", "hello", max_tokens=300)
        next(iter(stream))
        os.kill(gang.ranks[1].pid, 9)
        assert stream.text == text
        assert daemon.model("gang").restarts == 1
        client.unload("gang")
        wait_for(
            "both GPUs are free",
            lambda: [it.granted_bytes for it in client.status().devices] == [0, 0],
        )
        assert client.status().host_budget.granted_bytes == 0
