"""Tells how much of some files the operating system holds in its page cache, without reading them.

Files in the page cache are read about ten times as fast as those that are only on disk (14 and
1.4 GB/s, the host of an H200), so the two have rates of their own (`kvd.worker.core.rates`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SAMPLES = 64
"""About how many places are checked in all files together; at least one in each."""
_PLACE_BYTES = 64 * 1024
"""Bytes that are checked at each place."""
Part = tuple[float, float]
"""Start and end of a part of a file, as shares of its bytes."""
WHOLE: Part = (0.0, 1.0)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping(NamedTuple):
    """The part of a mapped file that is checked."""

    address: int
    """Address of the first byte of the file."""
    start: int
    end: int


def cached_share(paths: Sequence[Path], parts: Sequence[Part] | None = None) -> float:
    """Return the share of the files' bytes that are in the page cache, from 0 to 1.

    ``parts``: the part of each file that counts; None: all of them. The share is estimated from
    about `SAMPLES` places at equal distances. Missing, empty and irregular files do not count.
    Returns 1 if no byte counts, or if the system has no mincore(2).
    """
    try:
        _library()
    except (AttributeError, OSError):
        return 1.0
    cached = known = 0.0
    with ExitStack() as mapped:
        found = [
            mapped.enter_context(_map(path, part))
            for path, part in zip(paths, parts or [WHOLE] * len(paths), strict=True)
        ]
        mappings = [one for one in found if one is not None]
        total = sum(one.end - one.start for one in mappings)
        for one in mappings:
            nbytes = one.end - one.start
            share = _share_of(one, math.ceil(SAMPLES * nbytes / total))
            if share is not None:
                cached, known = cached + share * nbytes, known + nbytes
    return cached / known if known else 1.0


@contextmanager
def _map(path: Path, part: Part) -> Iterator[_Mapping | None]:
    """Map a regular file, none of which is read; None: it cannot be mapped, or nothing counts.

    Python's own `mmap` holds its lock meanwhile, and some file systems ask a server.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(fd)
        nbytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
        start, end = (int(share * nbytes) for share in part)
        address = _mmap(fd, nbytes) if start < end else None
    finally:
        os.close(fd)
    if address is None:
        yield None
        return
    try:
        yield _Mapping(address, start, end)
    finally:
        _library().munmap(address, nbytes)


def _share_of(mapping: _Mapping, places: int) -> float | None:
    """Return the cached share of the bytes at some places; None: it cannot be found out."""
    length = min(mapping.end - mapping.start, _PLACE_BYTES)
    last, gaps = mapping.end - mapping.start - length, max(1, places - 1)
    offsets = {mapping.start + last * place // gaps for place in range(places)}
    starts = [mapping.address + offset - offset % mmap.PAGESIZE for offset in offsets]
    try:
        return sum(_resident(start, length) for start in starts) / len(starts)
    except OSError:
        return None


def _mmap(fd: int, nbytes: int) -> int | None:
    """Map a file; return its address, or None if that fails."""
    address: int | None = _library().mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    return None if address == _FAILED else address


def _resident(address: int, length: int) -> float:
    """Return the share of the pages of a mapping that are in memory; raises `OSError`."""
    pages = -(-length // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    if _library().mincore(address, length, found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(flags & 1 for flags in found) / pages


@cache
def _library() -> Any:
    """Return the C library with mmap(2), munmap(2) and mincore(2) of Linux and macOS.

    Raises `AttributeError` if it lacks one.
    """
    library = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.mmap.argtypes = (address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.mmap.restype = address
    library.munmap.argtypes = (address, size)
    library.mincore.argtypes = (address, size, address)
    return library
