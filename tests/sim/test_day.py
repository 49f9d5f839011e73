"""Simulated days: no starvation, no use above the grant, each request ends exactly once."""

from __future__ import annotations

import pytest

from tests.breadth import part_of
from tests.sim.day import Day


@pytest.mark.slow
@pytest.mark.parametrize("seed", part_of([1, 4], 2))
def test_a_day_of_mixed_traffic(seed: int) -> None:
    day = Day(seed)
    day.run()

    assert day.now > 23 * 3600
    assert day.counts["finished"] > 0.7 * len(day.requests)
    for event in (
        "suspended",
        "preempted",
        "cancelled",
        "expired",
        "refused",
        "choices",
        "swapped out",
    ):
        assert day.counts[event] > 0, f"nothing was {event} on this day"
    for event in (
        "denied",
        "granted",
        "evicted",
        "made room",
        "stepped down",
        "grouped",
        "overtaken",
    ):
        assert day.counts[event] > 0, f"nothing was {event} on this day"
