"""Pages are copied from the host into a pool's own memory, which MLX then still writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.cache import cuda_driver
from kvd.worker.cache.host_copy import copy_pages, put_entries
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.snapshot_records import bytes_of
from kvd.worker.prefix.record_memory import RecordMemory
from protocol.record_file import DamagedFile
from tests.worker.cache.cuda import Driver

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


@given(slots=slot_lists())
def test_entries_equal_those_of_mlx(slots: Slots) -> None:
    kept = [slot for slot in slots if slot is not None]
    arrays, new = arrays_of(1, CAPACITY), arrays_of(2, len(kept))
    want = expected(arrays, [*kept], new)

    for array, source in zip(arrays, new, strict=True):
        put_entries(array, kept, source)

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


@pytest.mark.parametrize("fails_from", [1, 3, 9, 100])
def test_the_driver_copies_or_the_host_does(
    monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    driver = Driver(fails_from)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    arrays, new = arrays_of(1, CAPACITY), arrays_of(2, 4)
    slots: Slots = [3, 4, None, 7]
    want = expected(arrays, slots, new)

    copy_pages(arrays, slots, bytes_of(new))

    assert [bytes_of([array]) for array in arrays] == want
    # Two runs in each of four arrays, and one wait at the end, also after an error: copies that
    # have begun read the record.
    assert driver.calls == min(fails_from + (fails_from <= 2 * len(DTYPES)), 2 * len(DTYPES) + 1)
    assert driver.waits == 1
    assert not driver.due


@pytest.mark.parametrize("fails_from", [1, 100])
def test_the_memory_of_records_is_locked_while_it_is_open(
    monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    driver = Driver(fails_from)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    memory = RecordMemory(10_000, cuda_driver.lock)
    assert not driver.locked

    memory.open()
    address = np.frombuffer(memory.take(10_000), np.uint8).ctypes.data
    assert driver.locked == ({} if fails_from == 1 else {address: 10_000})
    memory.open()
    assert driver.calls == 1, "it is locked already"

    memory.close()
    assert not driver.locked
    assert not memory.is_open
