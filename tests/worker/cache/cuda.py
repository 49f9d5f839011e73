"""Stands for CUDA's driver where there is none: host and device have the same addresses."""

from __future__ import annotations

import ctypes
from typing import Any


class Driver:
    """CUDA's driver for memory of the host, which reports an error from the n-th call on."""

    def __init__(self, fails_from: int) -> None:
        self.calls = 0
        self.waits = 0
        self.fails_from = fails_from
        self.due: list[tuple[int, int, int]] = []
        self.locked: dict[int, int] = {}

    def _failed(self) -> bool:
        self.calls += 1
        return self.calls >= self.fails_from

    def cuMemcpyHtoDAsync_v2(  # noqa: N802
        self, target: int, source: int, nbytes: int, _stream: int | None
    ) -> int:
        if self._failed():
            return 201
        self.due.append((target, source, nbytes))
        return 0

    def cuStreamSynchronize(self, _stream: int | None) -> int:  # noqa: N802
        self.waits += 1
        for one in self.due:
            ctypes.memmove(*one)
        self.due.clear()
        return 700 if self._failed() else 0

    def cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3
        if self._failed():
            return 712
        self.locked[address] = nbytes
        return 0

    def cuMemHostGetDevicePointer_v2(self, found: Any, address: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        found._obj.value = address
        return 0

    def cuMemHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0
