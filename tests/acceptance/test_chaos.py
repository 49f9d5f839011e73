"""Workers that die and hang under many streams, with real processes: `bench.chaos`, in short."""

from __future__ import annotations

import asyncio

import pytest


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_streams_have_the_tokens_of_an_undisturbed_run() -> None:
    chaos = pytest.importorskip("bench.chaos")
    found = asyncio.run(
        chaos.storm(kills=2, stops=1, streams=12, spared=4, kinds=10, tokens=100, seed=3)
    )

    assert found.wrong == []
    assert (found.kills, found.stops) == (2, 1)
    assert found.streams >= 12
    assert found.spared_streams >= 4
    assert found.restarts >= 2  # two strikes may meet one process
