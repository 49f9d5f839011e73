"""A day of mixed traffic: nobody starves, the grant is kept to, all end exactly once."""

from __future__ import annotations

import pytest

from tests.sim.day import Day


@pytest.mark.parametrize("seed", [1, 4])
def test_a_day_of_mixed_traffic(seed: int) -> None:
    day = Day(seed)
    day.run()

    assert day.now > 23 * 3600
    assert day.counts["finished"] > 0.7 * len(day.asked)
    for event in ("paused", "parked", "cancelled", "expired", "refused", "choices", "spilled"):
        assert day.counts[event] > 0, f"nothing was {event} on this day"
    for event in ("denied", "granted", "evicted", "made room", "lowered", "grouped", "overtaken"):
        assert day.counts[event] > 0, f"nothing was {event} on this day"
