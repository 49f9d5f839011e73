"""`bench.gpu.starts`: both starts of one server, and the modules that are stored after each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import load
from bench.gpu import starts
from kvd.bench.servers import Side
from kvd.worker.artifacts.entries import Entries

pytestmark = pytest.mark.mlx


def test_both_starts_share_caches_and_modules_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[str, str]] = []

    async def answer(side: Side, log: Path) -> float:
        cache = Path(side.environment["XDG_CACHE_HOME"], "kvd")
        started.append((side.name, str(cache)))
        stored = Entries(cache / "modules" / "kernels", 1 << 20)
        stored.put("mlx-1", b"gather_float32_int32_1\0names\0module")
        stored.put("other", b"a kernel of kvd's own")
        return float(len(started))

    monkeypatch.setattr(load, "first_answer", answer)
    file = tmp_path / "starts.json"
    starts.main(["--shape", "tiny", "--runs", "2", "--json", str(file)])
    found = json.loads(file.read_text())

    assert [name for name, _ in started] == ["kvd"] * 4
    assert len({folder for _, folder in started}) == 2
    modules = ["gather_float32_int32_1"]
    assert found["runs"] == [
        {
            "empty": {"seconds": 1.0 + 2 * run, "modules": modules},
            "full": {"seconds": 2.0 + 2 * run, "modules": modules},
        }
        for run in range(2)
    ]
    (bar,) = found["bars"]
    assert (bar["value"], bar["limit"], bar["passed"]) == (1, 5, True)
