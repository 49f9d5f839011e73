"""A worker's copy of the index: the longest stored beginning of a prompt."""

from __future__ import annotations

import pytest

from kvd.worker.prefix.queued_paths import path_of
from kvd.worker.prefix.segment_index import SegmentIndex
from protocol.segments import SegmentInfo

C = 4
NAMES = path_of(range(6 * C), "", C)
"""The path of a prompt of five whole chunks."""


@pytest.mark.parametrize("chunks", range(1, 6))
@pytest.mark.parametrize("held", range(6))
def test_a_segment_is_found_if_it_is_longer_than_what_is_held(chunks: int, held: int) -> None:
    index = SegmentIndex(bytes(16), C)
    segment = SegmentInfo(key=index.key(NAMES[chunks - 1]), tokens=C * chunks, nbytes=1)
    index.change([segment], [])
    assert index.find(NAMES, above=C * held) == ([segment] if chunks > held else [])
