"""Days of the whole daemon: nothing is lost, repeated, leaked or over the budget."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.breadth import ALL
from tests.sim.daemon_day import play

SEEDS = 270 if ALL else 66
GROUPS = 3 if ALL else 1

HAPPENED = (
    "attach",
    "cancel",
    "clock jumped",
    "daemon killed",
    "daemon restarts",
    "drain",
    "ended: deadline_exceeded",
    "ended: draining",
    "ended: length",
    "ended: stop",
    "follow",
    "follower killed",
    "follower stopped",
    "killed",
    "model removed",
    "policy",
    "stopped",
)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_days_of_faults(group: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1 + group, 1 + SEEDS, GROUPS):
        try:
            counts.update(play(seed).counts)
        except BaseException as error:
            error.add_note(f"run again: python -m tests.sim.daemon_day {seed}")
            raise
    for event in HAPPENED:
        assert counts[event] > 0, f"no {event} in {SEEDS // GROUPS} days"


def test_a_seed_replays() -> None:
    first: list[str] = []
    second: list[str] = []
    play(3, first.append)
    play(3, second.append)

    assert first == second
