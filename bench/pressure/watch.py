"""Samples the workers' footprint 20 times a second, and the bytes that they report by kind.

On Linux, reading the proportional set size is too slow for that, because the kernel walks all page
tables. So a process's own pages, which change most, are read from ``statm`` for every sample, and
its share of file pages from ``smaps_rollup`` every few seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict, dataclass, field
from os import sysconf
from pathlib import Path
from typing import Any, Self

from kvd.client import AsyncClient
from kvd.host import memory
from protocol.types import DaemonStatus, MemoryUse, ModelStatus

HERTZ = 20
STATUS_HERTZ = 20
_SHARES_S = 5.0
_PROC = Path("/proc")


@dataclass(frozen=True)
class Sample:
    """One sample: seconds since the start, and bytes of all workers."""

    at: float
    footprint: int
    device: int
    """Active and cached bytes of MLX's allocators, as last reported; governed on GPUs."""
    device_peak: int
    """Like ``device``, with the peak of active bytes since the report before."""


@dataclass(frozen=True)
class Kinds:
    """Bytes that the workers hold, as last reported, by kind."""

    at: float
    granted: int
    by_kind: dict[str, int]
    waiting: int
    running: int


@dataclass
class Watch:
    """Takes samples in background tasks: ``async with Watch(client) as watch``."""

    client: AsyncClient
    samples: list[Sample] = field(default_factory=list)
    kinds: list[Kinds] = field(default_factory=list)
    status: DaemonStatus | None = None
    """Newest status of the daemon."""

    async def __aenter__(self) -> Self:
        self._start = time.perf_counter()
        self._reader = memory.reader()
        self._shared: dict[int, int] = {}
        self._shared_at = -_SHARES_S
        await self._look()
        self._tasks = [
            asyncio.create_task(self._every(1 / STATUS_HERTZ, self._look)),
            asyncio.create_task(self._every(1 / HERTZ, self._sample)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "samples": [
                [round(s.at, 3), s.footprint, s.device, s.device_peak] for s in self.samples
            ],
            "kinds": [asdict(one) for one in self.kinds],
        }

    async def _every(self, seconds: float, look: Any) -> None:
        due = time.perf_counter()
        while True:
            await look()
            due = max(due + seconds, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())

    async def _look(self) -> None:
        self.status = status = await self.client.status()
        by_kind: dict[str, int] = {}
        for model in status.models:
            for kind, nbytes in kinds_of(model).items():
                by_kind[kind] = by_kind.get(kind, 0) + nbytes
        stats = [model.stats for model in status.models]
        self.kinds.append(
            Kinds(
                at=round(self.now, 3),
                granted=status.granted_bytes,
                by_kind=by_kind,
                waiting=sum(one.rows_waiting for one in stats),
                running=sum(one.rows_running + one.rows_prefilling for one in stats),
            )
        )

    async def _sample(self) -> None:
        models = self.status.models if self.status is not None else []
        pids = [model.worker_pid for model in models if model.worker_pid]
        uses = [model.stats.memory for model in models]
        footprint = await asyncio.to_thread(self._footprint, pids)
        device = sum(one.active + one.cache for one in uses)
        peak = sum(max(one.active, one.peak) + one.cache for one in uses)
        self.samples.append(Sample(self.now, footprint, device, peak))

    def _footprint(self, pids: list[int]) -> int:
        if sys.platform != "linux":
            return sum(self._reader.footprint(pid) for pid in pids)
        own = {pid: _own_pages(pid) for pid in pids}
        if self.now - self._shared_at > _SHARES_S or own.keys() - self._shared.keys():
            self._shared_at = self.now
            self._shared = {
                pid: max(0, self._reader.footprint(pid) - _own_pages(pid)) for pid in pids
            }
        return sum(own.values()) + sum(self._shared[pid] for pid in pids)


def _own_pages(pid: int) -> int:
    """Return the bytes of a process's resident pages that belong to no file; 0 if it is gone."""
    try:
        _, resident, shared, *_ = (_PROC / str(pid) / "statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * sysconf("SC_PAGE_SIZE")


def kinds_of(model: ModelStatus) -> dict[str, int]:
    """Return the bytes that one worker holds by kind, with pages by their current scheme."""
    use: MemoryUse = model.stats.memory
    schemes = model.info.kv_schemes if model.info is not None else []
    pages = {f"pages {name}": n for name, n in zip(schemes, use.kv_levels, strict=False)}
    return {
        "weights": use.weights,
        **pages,
        "free pages": max(0, use.kv_pages - sum(use.kv_levels)),
        "tails": use.kv_tails,
    }
