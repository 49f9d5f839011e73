"""Places in the queue: exactly in front, roughly behind, and few reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.scheduling.queue_positions import EXACT, QueuePositions


def told(positions, line):
    positions.mark_changed()
    return {one.rid: one.position for one in positions.updates(line)}


def test_everybody_is_told_once_and_again_when_it_moves():
    positions = QueuePositions()
    assert positions.updates("ab") == []  # nobody said that something changed
    assert told(positions, "abc") == {"a": 1, "b": 2, "c": 3}
    assert told(positions, "abc") == {}
    assert told(positions, "bc") == {"b": 1, "c": 2}
    assert told(positions, "xbc") == {"x": 1, "b": 2, "c": 3}


def test_who_left_and_came_back_is_told_again():
    positions = QueuePositions()
    told(positions, "ab")
    assert told(positions, "b") == {"b": 1}
    assert told(positions, "ab") == {"a": 1, "b": 2}


def test_an_end_is_news_only_for_those_who_wait():
    positions = QueuePositions()
    told(positions, "a")
    positions.forget("never waited")
    assert not positions.stale
    positions.forget("a")
    assert positions.stale


def test_a_long_queue_that_moves_makes_few_reports():
    positions = QueuePositions()
    line = [f"r{number}" for number in range(1000)]
    reports = 0
    while line:
        reports += len(told(positions, line))
        del line[0]
    assert reports < 1000 * 45


@given(st.lists(st.lists(st.integers(0, 40), unique=True), max_size=30))
def test_what_was_told_is_never_far_off(lines):
    positions, known = QueuePositions(), {}
    for line in lines:
        names = [str(one) for one in line]
        known |= told(positions, names)
        for place, rid in enumerate(names, 1):
            exact = min(place, known[rid]) <= EXACT
            assert known[rid] == place if exact else abs(known[rid] - place) * 8 < known[rid]
