"""Memory readings: one function set over Linux, macOS and NVIDIA.

`reader` returns the one for this machine; `default_budget` turns a reading into a budget. Reads
only: who may use how much is the governor's business.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from protocol.types import HostMemory

BUDGET_SHARE = 0.75
"""Of what the models may use at most: leaves room for the system and for what is not counted."""


class Reader(Protocol):
    """What one machine can say about its memory."""

    def host(self) -> HostMemory:
        """Return what the machine has, in total and now."""
        ...

    def footprint(self, pid: int) -> int:
        """Return the bytes that are this process's own; 0 if it is gone or not readable."""
        ...

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        """Return the same of several, read in a thread: 25 ms for each GiB on Linux."""
        ...

    @property
    def separate(self) -> bool:
        """Whether the accelerator has memory of its own."""
        ...


def reader() -> Reader:
    """Return the readings of this machine."""
    if sys.platform == "darwin":
        from kvd.host.memory.darwin import DarwinMemory  # noqa: PLC0415 - binds macOS libraries

        return DarwinMemory()
    from kvd.host.memory.linux import LinuxMemory  # noqa: PLC0415 - the other half of the choice

    return LinuxMemory()


def default_budget(host: HostMemory) -> int:
    """Return a safe budget: a share of the accelerator's memory, else of the machine's."""
    return int(BUDGET_SHARE * (host.accelerator_limit or host.total))
