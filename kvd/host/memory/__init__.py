"""Memory readings of Linux, macOS and NVIDIA devices, and the default budget."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from protocol.types import HostMemory

BUDGET_SHARE = 0.75
"""Share of the memory that models may use, leaving the rest to the system."""


class Reader(Protocol):
    """Memory readings of one machine."""

    def host(self) -> HostMemory: ...

    def footprint(self, pid: int) -> int:
        """Return the bytes that a process holds; 0 if it has ended or is not readable."""

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        """Return the footprints of live processes, read in a thread (25 ms per GiB on Linux)."""

    @property
    def separate(self) -> bool:
        """Whether MLX computes in an accelerator's own memory, which footprints do not include."""

    @property
    def devices(self) -> list[str]:
        """Names of the CUDA devices, in the order of their numbers; empty if there is none."""


def reader() -> Reader:
    if sys.platform == "darwin":
        from kvd.host.memory.darwin import DarwinMemory  # noqa: PLC0415 - binds macOS libraries

        return DarwinMemory()
    from kvd.host.memory.linux import LinuxMemory  # noqa: PLC0415 - only where it is needed

    return LinuxMemory()


def default_budget(host: HostMemory) -> int:
    """Return `BUDGET_SHARE` of the accelerator's memory, or of the machine's if it has none.

    With several accelerators, it is the budget of each.
    """
    return int(BUDGET_SHARE * (host.accelerator_limit or host.total))


def host_budget(reader: Reader) -> int | None:
    """Return `BUDGET_SHARE` of the host's memory; None if `default_budget` is about that memory."""
    return int(BUDGET_SHARE * reader.host().total) if reader.separate else None
