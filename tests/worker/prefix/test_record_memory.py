"""Memory that is given out in order: pieces never overlap, and there is room when there can be."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.prefix.record_memory import RecordMemory

NBYTES = 4096


def start_of(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).ctypes.data)


@given(st.lists(st.one_of(st.integers(1, NBYTES), st.integers(1, 600), st.none()), max_size=80))
def test_pieces_are_apart_and_keep_their_content(operations: list[int | None]) -> None:
    """A number takes so many bytes, and frees the oldest ones until there is room."""
    memory = RecordMemory(NBYTES)
    memory.open()
    held: deque[tuple[memoryview, int]] = deque()
    for at, nbytes in enumerate(operations):
        while held and (nbytes is None or not memory.has_room(nbytes)):
            piece, byte = held.popleft()
            assert bytes(piece) == bytes([byte]) * len(piece)
            memory.free_oldest()
            if nbytes is None:
                break
        if nbytes is not None:
            assert memory.has_room(nbytes), "an empty memory has room for all that fits"
            piece = memory.take(nbytes)
            assert len(piece) == nbytes
            piece[:] = bytes([at]) * nbytes
            held.append((piece, at))
    for piece, byte in held:
        assert bytes(piece) == bytes([byte]) * len(piece)


def test_equal_pieces_follow_each_other_and_use_the_memory_again() -> None:
    memory = RecordMemory(NBYTES)
    memory.open()
    first = [start_of(memory.take(1024)) for _ in range(4)]
    assert first == [first[0] + 1024 * number for number in range(4)]
    assert not memory.has_room(1)
    for start in first:
        memory.free_oldest()
        assert not memory.has_room(1025)
        assert start_of(memory.take(1024)) == start


def test_what_is_larger_never_has_room() -> None:
    memory = RecordMemory(NBYTES)
    memory.open()
    assert memory.has_room(NBYTES)
    assert not memory.has_room(NBYTES + 1)


def test_an_opened_memory_is_empty_and_stays_in_place() -> None:
    memory = RecordMemory(NBYTES)
    memory.open()
    start = start_of(memory.take(NBYTES))
    memory.open()
    assert start_of(memory.take(NBYTES)) == start
    memory.close()
    with pytest.raises(AssertionError, match="open"):
        memory.take(1)
