"""Pages are copied from the host into a pool's own memory, which MLX then still writes in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.cache import host_copy
from kvd.worker.cache.host_copy import copy_pages
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.snapshot_records import bytes_of
from protocol.record_file import DamagedFile

pytestmark = pytest.mark.mlx

CAPACITY = 12
DTYPES = [mx.bfloat16, mx.float16, mx.float32, mx.uint32]
Slots = list[int | None]


def slot_lists() -> st.SearchStrategy[Slots]:
    """Return lists of distinct slots, most of them in runs, some of them None."""

    @st.composite
    def some(draw: st.DrawFn) -> Slots:
        slots: Slots = list(draw(st.permutations(range(CAPACITY))))
        if draw(st.booleans()):
            slots = list(range(CAPACITY))
        first = draw(st.integers(0, CAPACITY - 1))
        chosen = slots[first : draw(st.integers(first, CAPACITY))]
        return [slot if draw(st.integers(0, 4)) else None for slot in chosen]

    return some()


def arrays_of(seed: int, pages: int) -> list[mx.array]:
    """Return an array of each dtype, one that is empty, and one with odd sizes."""
    mx.random.seed(seed)
    shapes = [(pages, 2, 3), (pages, 5), (pages, 1, 8), (pages, 7), (pages, 0)]
    arrays = [
        mx.random.randint(0, 1 << 15, shape).astype(dtype)
        for shape, dtype in zip(shapes, [*DTYPES, mx.float32], strict=True)
    ]
    mx.eval(arrays)
    return arrays


def expected(before: Sequence[mx.array], slots: Slots, new: Sequence[mx.array]) -> list[bytes]:
    """Return the bytes of the arrays after the copies, made with MLX's own operations."""
    found = []
    for array, source in zip(before, new, strict=True):
        target = mx.array(array)
        for at, slot in enumerate(slots):
            if slot is not None and array.size:
                target[slot] = source[at]
        found.append(bytes_of([target]))
    return found


@given(slots=slot_lists())
def test_copies_equal_those_of_mlx(slots: Slots) -> None:
    arrays, new = arrays_of(1, CAPACITY), arrays_of(2, len(slots))
    want = expected(arrays, slots, new)

    copy_pages(arrays, slots, bytes_of(new))

    assert [bytes_of([array]) for array in arrays] == want


@pytest.mark.parametrize("more", [-1, 1])
def test_a_record_of_another_length_is_damaged(more: int) -> None:
    arrays, new = arrays_of(1, CAPACITY), arrays_of(2, 3)
    before = bytes_of(arrays)
    record = bytes_of(new)
    record = record[:more] if more < 0 else record + b"x"

    with pytest.raises(DamagedFile, match=f"{len(record)} bytes instead of {len(bytes_of(new))}"):
        copy_pages(arrays, [0, 1, 2], record)
    assert bytes_of(arrays) == before


def pointer(array: mx.array) -> int:
    view: Any = array
    return int(np.frombuffer(memoryview(view).cast("B"), np.uint8).ctypes.data)


def test_pools_stay_in_place_during_and_after_copies() -> None:
    """A second reference makes the next flush copy the pool. A view that is kept holds memory."""
    geometry = LayerGeometry(2, 64, 64)
    pool = PagePool(geometry, Scheme(8, 8), mx.float32)
    pool.grow(2048)
    pages = pool.pack(mx.random.normal((16, 2, 64, 64)), mx.random.normal((16, 2, 64, 64)))
    mx.eval(pages)
    record = bytes_of([array for side in pages for array in side])
    pointers = [pointer(array) for array in pool.arrays()]
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()

    for slots in (list(range(16)), list(range(40, 72, 2)), list(range(100, 116))):
        copy_pages(pool.arrays(), slots, record)
        pool.write(slots, *pages)
        mx.eval(pool.arrays())
        assert [pointer(array) for array in pool.arrays()] == pointers
        assert bytes_of([a for side in pool.copy(mx.array(slots)) for a in side]) == record

    assert mx.get_active_memory() - held < pool.nbytes // 100
    assert mx.get_peak_memory() - held < pool.nbytes // 4
    full = pool.nbytes
    pool.cut(1024)
    assert held - mx.get_active_memory() > full // 3, "the old arrays are free"


class Driver:
    """CUDA's driver for memory of the host, which reports an error from the n-th call on."""

    def __init__(self, fails_from: int) -> None:
        self.calls = 0
        self.fails_from = fails_from

    def _failed(self) -> bool:
        self.calls += 1
        return self.calls >= self.fails_from

    def cuMemcpyHtoD_v2(self, target: int, source: int, nbytes: int) -> int:  # noqa: N802
        if self._failed():
            return 201
        ctypes.memmove(target, source, nbytes)
        return 0

    def cuStreamSynchronize(self, stream: int | None) -> int:  # noqa: N802
        return 700 if self._failed() else 0


@pytest.mark.parametrize("fails_from", [1, 3, 9, 100])
def test_the_driver_copies_or_the_host_does(
    monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    driver = Driver(fails_from)
    monkeypatch.setattr(host_copy, "_driver", lambda: driver)
    arrays, new = arrays_of(1, CAPACITY), arrays_of(2, 4)
    slots: Slots = [3, 4, None, 7]
    want = expected(arrays, slots, new)

    copy_pages(arrays, slots, bytes_of(new))

    assert [bytes_of([array]) for array in arrays] == want
    # Two runs in each of four arrays, and one wait at the end.
    assert driver.calls == min(fails_from, 2 * len(DTYPES) + 1)
