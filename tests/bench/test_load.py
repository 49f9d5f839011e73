"""The bench of loads: each server has caches of its own, which its second start finds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import load
from kvd.bench.servers import Side


def test_both_servers_keep_their_caches_in_the_folder(tmp_path: Path) -> None:
    ours, theirs = load.sides("/model", tmp_path, "k8v8")
    assert ours.environment["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    assert theirs.environment["MLX_PTX_CACHE_DIR"] == str(tmp_path / "modules")
    assert (tmp_path / "cache" / "kvd").stat().st_mode & 0o777 == 0o700


def test_each_server_starts_with_empty_and_with_full_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[tuple[str, str]] = []

    async def answer(side: Side, log: Path) -> float:
        starts.append((side.name, str(log.parent)))
        return float(len(starts))

    monkeypatch.setattr(load, "first_answer", answer)
    times = asyncio.run(load.measure("/model", 2, "k8v8"))
    assert [name for name, _ in starts] == ["kvd"] * 2 + ["mlx-lm"] * 4 + ["kvd"] * 2
    assert len({folder for _, folder in starts}) == 2
    assert times["kvd"] == {"empty": [1.0, 7.0], "full": [2.0, 8.0]}
    assert load.medians(times)["mlx-lm"] == {"empty": 4.0, "full": 5.0}
    assert "run 2, kvd, full caches: 8.0 s" in capsys.readouterr().out
    within, late = load.bars(load.medians(times))
    assert (within["value"], within["passed"]) == (4.0, True)
    assert (late["value"], late["passed"]) == (1.0, True)
