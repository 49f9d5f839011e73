"""A week under one budget: never exceeded, nobody aborted, all end, no livelock, cheapest first."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.week import Week

SEEDS = 50
GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_weeks_of_mixed_traffic(group: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1 + group, 1 + SEEDS, GROUPS):
        week = Week(seed)
        try:
            week.run()
        except AssertionError as error:
            error.add_note(f"again: python -m tests.sim.week {seed}")
            raise
        assert week.steps > 3000
        assert week.counts["finished"] > 0.95 * len(week.asked)
        counts.update(week.counts)
    for what in ("spare", "prefixes", "precision", "preempt"):
        assert counts[f"reclaim {what}"] > 0, f"nothing was reclaimed by {what}"
    for what in ("evicted", "held", "requeued", "parked", "crashed", "start level"):
        assert counts[what] > 0, f"nothing was {what}"
    for what in ("tight", "calm", "budget", "excess", "first"):
        assert counts[f"noted {what}"] > 0, f"nothing was {what}"


def test_a_seed_replays() -> None:
    one, two = Week(3), Week(3)
    one.run()
    two.run()

    assert (one.now, one.counts) == (two.now, two.counts)
