"""Readings of processes that may take long, off the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def footprints(read: Callable[[int], int], pids: list[int]) -> dict[int, int]:
    """Read these processes in a thread; those that are gone are left out."""

    def all_of_them() -> dict[int, int]:
        return {pid: found for pid in pids if (found := read(pid))}

    return await asyncio.to_thread(all_of_them)
