"""What a scrape gets: a snapshot of the running system, as text in the format that it asks for.

The snapshot is gathered on the event loop, in a fraction of a millisecond. To encode it takes
prometheus-client some 10 ms, which a thread has for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from kvd.metrics import process
from kvd.metrics.gather import Snapshot, samples_of
from kvd.metrics.lag import Lag
from kvd.metrics.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.request_state import Stage
    from kvd.metrics.samples import Samples
    from protocol.types import DaemonStatus

Answer = tuple[bytes, str]
"""A body and its content type."""
Beside = Callable[[Callable[[], Answer]], Awaitable[Answer]]
"""Calls a function elsewhere and waits for what it returns; `asyncio.to_thread` does."""


class Observed(Protocol):
    """What is asked of a system (`actors.system`)."""

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        ...

    def status(self) -> DaemonStatus:
        """Return the newest snapshots."""
        ...

    def count_requests(self) -> Mapping[tuple[str, Stage], int]:
        """Count requests by model and what they do."""
        ...

    def knows(self, model: str) -> bool:
        """Return whether there is such a model."""
        ...


class Exposition:
    """All that a daemon measures: give ``tally`` to its system, and `start` when that runs."""

    def __init__(self, system: Callable[[], Observed], beside: Beside = asyncio.to_thread) -> None:
        self.tally = Tally(lambda model: system().knows(model))
        self._system = system
        self._lag = Lag(lambda: system().busy)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._started_at = time.time()
        self._beside = beside
        self._turn = asyncio.Lock()
        """One scrape at a time: memory is read in the same few threads, and waits for no crowd."""

    def start(self) -> None:
        """Begin to measure the event loop, which runs now."""
        self._lag.start()

    def stop(self) -> None:
        """End that."""
        self._lag.stop()

    def answered(self, path: str, status: int) -> None:
        """Count an answer of HTTP."""
        self._answers[path, status] += 1

    async def text(self) -> str:
        """Return all that is known now, in Prometheus's plain format."""
        body, _ = await self.answer()
        return body.decode()

    async def answer(self, accept: str = "") -> Answer:
        """Return all that is known now, for a client that accepts this (HTTP's Accept)."""
        async with self._turn:
            samples = self._gathered()
            return await self._beside(lambda: _encoded(samples, accept))

    def _gathered(self) -> Samples:
        system = self._system()
        snapshot = Snapshot(
            status=system.status(),
            requests=system.count_requests(),
            tally=self.tally,
            lag=self._lag.seen,
            answers=self._answers,
            process=process.read(),
            started_at=self._started_at,
        )
        return samples_of(snapshot)


def _encoded(samples: Samples, accept: str) -> Answer:
    from kvd.metrics.families import encoded  # noqa: PLC0415 - 2 MB for scrapes alone

    return encoded(samples, accept)
