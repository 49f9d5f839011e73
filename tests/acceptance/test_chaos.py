"""A short `bench.chaos`: real workers die and hang while they serve many streams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_streams_have_the_tokens_of_an_undisturbed_run() -> None:
    chaos = pytest.importorskip("bench.chaos")
    found = asyncio.run(
        chaos.storm(kills=2, stops=1, streams=12, spared=4, kinds=6, tokens=100, seed=3)
    )

    assert (found.wrong, found.remaining) == ([], [])
    assert (found.count("kill"), found.count("stop")) == (2, 1)
    assert found.streams >= 12
    assert found.spared_streams >= 4
    assert found.restarts >= 2  # two of the three faults may hit the same process


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_streams_of_a_gang_have_the_tokens_of_one_process() -> None:
    """The seed hits both ranks, one of them while the gang starts or loads."""
    chaos = pytest.importorskip("bench.chaos")
    found = asyncio.run(
        chaos.storm(kills=2, stops=2, streams=4, spared=0, kinds=4, tokens=60, seed=2, ranks=2)
    )

    assert (found.wrong, found.remaining) == ([], [])
    assert (found.count("kill"), found.count("stop")) == (2, 2)
    assert {blow.rank for blow in found.blows} == {0, 1}
    assert found.streams >= 4
    assert found.restarts >= 2


def test_the_recorded_run_lost_nothing() -> None:
    found = json.loads((RESULTS / "chaos-linux-cpu.json").read_text())

    assert (found["wrong"], found["asked"]["streams"]) == ([], 16)
    assert found["kills"] >= 30
    assert found["stops"] > 0
    assert found["streams"] > 16
    assert found["spared_streams"] > 16


def test_the_recorded_run_over_two_ranks_lost_nothing() -> None:
    found = json.loads((RESULTS / "chaos-gang-linux-cpu.json").read_text())

    assert (found["wrong"], found["remaining"], found["asked"]["ranks"]) == ([], [], 2)
    assert (found["kills"], found["stops"]) == (50, 50)
    times = {tuple(name.split(", ")) for name in found["back"]}
    states = {"spawning", "loading", "ready"}
    assert times == {(kind, state) for kind in ("kill", "stop") for state in states}
