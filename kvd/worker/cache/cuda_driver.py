"""CUDA's driver: copies from the host's memory to the device, and page-locked memory.

With CUDA, memory that the host writes moves to the GPU by page faults at 1.5 GB/s. The driver's own
copy reaches 12 to 14 GB/s from ordinary memory (H200), because it copies to page-locked memory
first. From page-locked memory the device copies at the speed of its bus.

Its functions may be called in the thread that MLX has used first: only there is a context current.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence

from kvd.worker.device import on_cuda
from kvd.worker.lean_imports import np

_log = logging.getLogger("kvd.worker")

Copy = tuple[int, int, int]
"""Addresses of the target and the source, and bytes."""

_FLAGS = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: for all contexts, and for kernels
_locked: dict[int, tuple[int, int]] = {}
"""Bytes of each locked memory, and its address on the device, by its address on the host."""


def is_usable() -> bool:
    """Return whether MLX computes with CUDA."""
    return _driver() is not None


def copy(copies: Sequence[Copy]) -> bool:
    """Copy to the device, and wait for all copies; False: there is no driver, or an error."""
    driver = _driver()
    if driver is None:
        return False
    failed = any(driver.cuMemcpyHtoDAsync_v2(*one, None) for one in copies)
    # MLX's streams do not wait for the default stream.
    return not driver.cuStreamSynchronize(None) and not failed


def lock(memory: memoryview) -> Callable[[], None]:
    """Lock whole pages of writable memory in place; return what unlocks them.

    Without a driver, or if the system refuses, copies from this memory are slower.
    """
    driver = _driver()
    if driver is None:
        return _do_nothing
    address, found = np.frombuffer(memory, np.uint8).ctypes.data, ctypes.c_uint64()
    if error := driver.cuMemHostRegister_v2(address, memory.nbytes, _FLAGS):
        _log.info("copies to the device are slower: memory is not page-locked, error %d", error)
        return _do_nothing
    if not driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), address, 0):
        _locked[address] = memory.nbytes, found.value
    return functools.partial(_unlock, driver, address)


def device_address(address: int, nbytes: int) -> int | None:
    """Return where a kernel finds memory of the host; None: it is not locked."""
    for start, (length, on_device) in _locked.items():
        if start <= address and address + nbytes <= start + length:
            return on_device + address - start
    return None


def _unlock(driver: ctypes.CDLL, address: int) -> None:
    _locked.pop(address, None)
    driver.cuMemHostUnregister(address)


def _do_nothing() -> None:
    pass


@functools.cache
def _driver() -> ctypes.CDLL | None:
    if not on_cuda():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, address, size, address]
    driver.cuStreamSynchronize.argtypes = [address]
    driver.cuMemHostRegister_v2.argtypes = [address, size, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [address]
    pointer = ctypes.POINTER(ctypes.c_uint64)
    driver.cuMemHostGetDevicePointer_v2.argtypes = [pointer, address, ctypes.c_uint]
    return driver
