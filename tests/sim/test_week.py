"""Simulated weeks: the budget is never exceeded, no request is aborted, memory is reclaimed by the
cheapest method first, and reclaiming ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.breadth import ALL
from tests.sim.week import Week

SEEDS = 16 if ALL else 8
GROUPS = SEEDS // 4
PLACED_SEEDS = 4 if ALL else 2
"""Seeds of weeks on two devices. Each such week has every event that its test looks for."""


def counts_of(seeds: Iterable[int], **options: int) -> Counter[str]:
    """Run weeks in which almost all requests finish; return what happened in all of them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        week = Week(seed, **options)
        try:
            week.run()
        except AssertionError as error:
            error.add_note(f"run again: Week({seed}, **{options}).run()")
            raise
        assert week.steps > 3000
        assert week.counts["finished"] > 0.95 * len(week.requests)
        counts.update(week.counts)
    return counts


@pytest.mark.parametrize("group", range(GROUPS))
def test_weeks_of_mixed_traffic(group: int) -> None:
    counts = counts_of(range(1 + group, 1 + SEEDS, GROUPS))
    for method in ("spare", "prefixes", "precision", "preempt"):
        assert counts[f"reclaim {method}"] > 0, f"nothing was reclaimed by {method}"
    for event in (
        "evicted",
        "held",
        "requeued",
        "preempted",
        "preempted for growth",
        "crashed",
        "start level",
    ):
        assert counts[event] > 0, f"nothing was {event}"
    for kind in ("tight", "calm", "budget", "excess", "first"):
        assert counts[f"event {kind}"] > 0, f"no event {kind}"


def test_weeks_on_two_devices() -> None:
    """Three models on each device: one of them is over both."""
    counts = counts_of(range(1, 1 + PLACED_SEEDS), devices=2)
    for event in ("reclaim precision", "reclaim preempt", "evicted", "held", "start level"):
        assert counts[event] > 0, f"no {event}"


def test_weeks_on_a_host_with_room_for_three_processes() -> None:
    """All five models together have six."""
    counts = counts_of(range(1, 1 + PLACED_SEEDS), devices=2, processes=3)
    for event in ("evict", "hold", "let_go", "first", "tight", "calm"):
        assert counts[f"event {event} for the host"] > 0, f"no {event}"
    assert counts["event evict"] > counts["event evict for the host"]


def test_a_seed_always_gives_the_same_week() -> None:
    first, second = Week(3), Week(3)
    first.run()
    second.run()

    assert (first.now, first.counts) == (second.now, second.counts)
