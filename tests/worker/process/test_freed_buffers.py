from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.worker.process import freed_buffers
from kvd.worker.process.freed_buffers import STEP_BYTES, FreedBuffers

MOST = 4 * STEP_BYTES


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the limits that are set, on a CUDA device as far as this module knows."""
    found: list[int] = []
    monkeypatch.setattr(freed_buffers, "on_cuda", lambda: True)
    monkeypatch.setattr(mx, "set_cache_limit", found.append)
    return found


def test_passes_leave_room_for_the_buffers_of_steps(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [0]
    monkeypatch.setattr(mx, "get_cache_memory", lambda: kept[0])
    buffers = FreedBuffers(MOST)
    buffers.prepare(prefills=False)
    assert limits == []
    for _ in range(3):
        buffers.prepare(prefills=True)
    assert limits == [MOST - STEP_BYTES]

    kept[0] = MOST - STEP_BYTES + 1  # the last pass has freed one buffer too many
    buffers.prepare(prefills=False)
    assert limits == [MOST - STEP_BYTES]  # the first step's allocations free it
    kept[0] = MOST - STEP_BYTES
    buffers.prepare(prefills=False)
    assert limits == [MOST - STEP_BYTES, MOST]

    kept[0] = MOST  # the room is for these buffers
    buffers.prepare(prefills=False)
    assert limits == [MOST - STEP_BYTES, MOST]
    buffers.prepare(prefills=True)
    assert limits == [MOST - STEP_BYTES, MOST, MOST - STEP_BYTES]


def test_other_devices_keep_their_limit(limits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_buffers, "on_cuda", lambda: False)
    FreedBuffers(MOST).prepare(prefills=True)
    assert limits == []
