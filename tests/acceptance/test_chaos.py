"""A short `bench.chaos`: real workers die and hang while they serve many streams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

RESULT = Path(__file__).parents[2] / "bench" / "results" / "chaos-linux-cpu.json"


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_streams_have_the_tokens_of_an_undisturbed_run() -> None:
    chaos = pytest.importorskip("bench.chaos")
    found = asyncio.run(
        chaos.storm(kills=2, stops=1, streams=12, spared=4, kinds=6, tokens=100, seed=3)
    )

    assert found.wrong == []
    assert (found.kills, found.stops) == (2, 1)
    assert found.streams >= 12
    assert found.spared_streams >= 4
    assert found.restarts >= 2  # two of the three faults may hit the same process


def test_the_recorded_run_lost_nothing() -> None:
    found = json.loads(RESULT.read_text())

    assert (found["wrong"], found["asked"]["streams"]) == ([], 16)
    assert found["kills"] >= 30
    assert found["stops"] > 0
    assert found["streams"] > 16
    assert found["spared_streams"] > 16
