"""Copies pages from the host's memory into evaluated arrays, in place.

On the CPU and on Metal an array's memory is the host's, so a copy is a `memcpy`. With CUDA, a
kernel copies from page-locked memory (`kvd.worker.cache.device_copy`), and the driver from other
memory (`kvd.worker.cache.cuda_driver`).

MLX does not know of these copies. Steps in flight may read and write other pages meanwhile, except
while the driver copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx

from kvd.worker.cache import cuda_driver, device_copy
from kvd.worker.lean_imports import np
from protocol.record_file import DamagedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

Record = bytes | bytearray | memoryview
COPIED_TOGETHER = 4
"""Most copies that are under way at once, if a device makes them. Waiting for one record of 2.2 MB
at a time takes 0.2 ms for each, of which the bus needs 0.04 ms (H200)."""
_Bytes: TypeAlias = "NDArray[np.uint8]"


def copy_pages(
    arrays: Sequence[mx.array], slots: Sequence[int | None], record: Record
) -> Callable[[], None] | None:
    """Copy a record of pages to ``slots`` of the arrays' first axes, in place.

    The record holds one page for each slot: those of the first array, of the second one, and so on.
    A page whose slot is None is not copied. Returns a function that waits for the end of the copy,
    or None if it has ended. The record's memory must not be reused before the end. Raises
    `DamagedFile` if the record has another length.
    """
    sizes = [math.prod(array.shape[1:]) * array.dtype.size for array in arrays]
    expect_bytes(record, len(slots) * sum(sizes))
    source = np.frombuffer(record, np.uint8)
    if (wait := device_copy.copy(arrays, slots, source)) is not None:
        return wait
    if cuda_driver.is_usable():
        mx.synchronize()  # the first view of an array may move its memory
    # Views of the arrays end with this call: MLX may write or free the arrays after it.
    runs, start = list(_runs(slots)), 0
    copies: list[tuple[_Bytes, _Bytes]] = []
    for array, size in zip(arrays, sizes, strict=True):
        if array.nbytes:
            target = np.frombuffer(_bytes_of(array), np.uint8)
            for at, slot, count in runs:
                first = start + at * size
                part = source[first : first + count * size]
                copies.append((target[slot * size : (slot + count) * size], part))
        start += len(slots) * size
    if not cuda_driver.copy([(_address(to), _address(part), part.nbytes) for to, part in copies]):
        for to, part in copies:
            to[:] = part
    return None


def put_entries(array: mx.array, slots: Sequence[int], source: mx.array) -> None:
    """Copy the entries of ``source`` to ``slots`` of an array's first axis, in place.

    Both are evaluated and contiguous. Only where MLX computes on the CPU, with nothing in flight
    that uses these slots.
    """
    if not source.nbytes:
        return
    size = source.nbytes // source.shape[0]
    target, entries = _bytes_of(array), _bytes_of(source)
    for at, slot, count in _runs(slots):
        target[slot * size : (slot + count) * size] = entries[at * size : (at + count) * size]


def _bytes_of(array: mx.array) -> memoryview:
    buffer: Any = array  # mlx's stubs do not declare it
    return memoryview(buffer).cast("B")


def needs_idle_device() -> bool:
    """Return whether `copy_pages` waits for steps in flight."""
    return cuda_driver.is_usable() and not device_copy.is_used()


def expect_bytes(record: Record, nbytes: int) -> None:
    """Raise `DamagedFile` if a record has another length."""
    if len(record) != nbytes:
        raise DamagedFile(f"a record has {len(record)} bytes instead of {nbytes}")


def _runs(slots: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """Yield index, slot and length of each run of consecutive slots; None is in no run."""
    at = 0
    while at < len(slots):
        end = at + 1
        if (first := slots[at]) is not None:
            while end < len(slots) and slots[end] == first + end - at:
                end += 1
            yield at, first, end - at
        at = end


def _address(view: _Bytes) -> int:
    address: int = view.__array_interface__["data"][0]
    return address
