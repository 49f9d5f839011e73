"""Slow memory readings in a thread, off the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def footprints(read: Callable[[int], int], pids: list[int]) -> dict[int, int]:
    """Read the footprints of these processes; ended ones are omitted."""

    def read_all() -> dict[int, int]:
        return {pid: footprint for pid in pids if (footprint := read(pid))}

    return await asyncio.to_thread(read_all)
