"""Queue positions: exact near the front, approximate further back, with few reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.scheduling.queue_positions import EXACT, QueuePositions


def reported(positions, queue):
    positions.stale = True
    return {one.rid: one.position for one in positions.updates(queue)}


def test_positions_are_reported_once_and_after_changes():
    positions = QueuePositions()
    assert positions.updates("ab") == []  # because nothing set `stale`
    assert reported(positions, "abc") == {"a": 1, "b": 2, "c": 3}
    assert reported(positions, "abc") == {}
    assert reported(positions, "bc") == {"b": 1, "c": 2}
    assert reported(positions, "xbc") == {"x": 1, "b": 2, "c": 3}


def test_a_requeued_request_is_reported_again():
    positions = QueuePositions()
    reported(positions, "ab")
    assert reported(positions, "b") == {"b": 1}
    assert reported(positions, "ab") == {"a": 1, "b": 2}


def test_only_the_end_of_a_reported_request_is_a_change():
    positions = QueuePositions()
    reported(positions, "a")
    positions.forget("never queued")
    assert not positions.stale
    positions.forget("a")
    assert positions.stale


def test_a_long_queue_causes_few_reports():
    positions = QueuePositions()
    queue = [f"r{number}" for number in range(1000)]
    reports = 0
    while queue:
        reports += len(reported(positions, queue))
        del queue[0]
    assert reports < 1000 * 45


@given(st.lists(st.lists(st.integers(0, 40), unique=True), max_size=30))
def test_reported_positions_are_never_far_off(queues):
    positions, known = QueuePositions(), {}
    for queue in queues:
        names = [str(one) for one in queue]
        known |= reported(positions, names)
        for position, rid in enumerate(names, 1):
            exact = min(position, known[rid]) <= EXACT
            assert known[rid] == position if exact else abs(known[rid] - position) * 8 < known[rid]
