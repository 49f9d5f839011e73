"""Copies pages from the host's memory into evaluated arrays, in place.

On the CPU and on Metal an array's memory is the host's, so a copy is a `memcpy`. With CUDA, memory
that the host writes moves to the GPU by page faults at 1.5 GB/s. The driver's own copy reaches 12
to 14 GB/s from ordinary memory (H200).

MLX does not know of these copies, so the device must be idle.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from protocol.record_file import DamagedFile

Record = bytes | bytearray | memoryview
_Bytes = NDArray[np.uint8]
_Copies = list[tuple[_Bytes, _Bytes]]
"""Targets and sources of the same length."""


def copy_pages(arrays: Sequence[mx.array], slots: Sequence[int | None], record: Record) -> None:
    """Copy a record of pages to ``slots`` of the arrays' first axes, in place.

    The record holds one page for each slot: those of the first array, of the second one, and so on.
    None: the page is not copied. Raises `DamagedFile` if the record has another length.
    """
    sizes = [math.prod(array.shape[1:]) * array.dtype.size for array in arrays]
    expect_bytes(record, len(slots) * sum(sizes))
    source, start = np.frombuffer(record, np.uint8), 0
    # Views of the arrays end with this call: MLX may write or free the arrays after it.
    copies: _Copies = []
    for array, size in zip(arrays, sizes, strict=True):
        if array.nbytes:
            buffer: Any = array  # mlx's stubs do not declare it
            target = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
            for at, slot, count in _runs(slots):
                first = start + at * size
                part = source[first : first + count * size]
                copies.append((target[slot * size : (slot + count) * size], part))
        start += len(slots) * size
    if not _copy_by_driver(copies):
        for to, part in copies:
            to[:] = part


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


def _copy_by_driver(copies: _Copies) -> bool:
    """Copy with CUDA's driver; return False if there is none or if it reports an error."""
    driver = _driver()
    if driver is None:
        return False
    for to, part in copies:
        if driver.cuMemcpyHtoD_v2(to.ctypes.data, part.ctypes.data, part.nbytes):
            return False
    # The copy returns once the source is read. MLX's streams do not wait for the default stream.
    return not driver.cuStreamSynchronize(None)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    if mx.default_device().type == mx.DeviceType.cpu or not mx.cuda.is_available():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuMemcpyHtoD_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
    driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    return driver
