"""Answers scrapes: takes a snapshot of the running system and encodes it.

The snapshot takes a fraction of a millisecond. Encoding takes about 10 ms and runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from kvd.metrics import process
from kvd.metrics.counters import Counters
from kvd.metrics.gather import Snapshot, samples_of
from kvd.metrics.lag import Lag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.request_state import Stage
    from kvd.metrics.samples import Samples
    from protocol.types import DaemonStatus

Answer = tuple[bytes, str]
"""A body and its content type."""
RunInThread = Callable[[Callable[[], Answer]], Awaitable[Answer]]
"""Runs a function off the event loop, like `asyncio.to_thread`."""


class ObservedSystem(Protocol):
    """The part of `actors.system.System` that is scraped."""

    @property
    def busy(self) -> bool:
        """Whether there are requests."""

    def status(self) -> DaemonStatus: ...

    def count_requests(self) -> Mapping[tuple[str, Stage], int]: ...

    def knows(self, model: str) -> bool: ...


class Exposition:
    """All metrics of a daemon; its system passes observations to ``counters``."""

    def __init__(
        self, system: Callable[[], ObservedSystem], run_in_thread: RunInThread = asyncio.to_thread
    ) -> None:
        self.counters = Counters(lambda model: system().knows(model))
        self._system = system
        self._lag = Lag(lambda: system().busy)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._ignored: Counter[tuple[str, str]] = Counter()
        self._started_at = time.time()
        self._run_in_thread = run_in_thread
        self._lock = asyncio.Lock()
        """Allows one scrape at a time, because memory readings need the same few threads."""

    def start(self) -> None:
        """Start to measure the lag of the running event loop."""
        self._lag.start()

    def stop(self) -> None:
        self._lag.stop()

    def answered(self, path: str, status: int) -> None:
        self._answers[path, status] += 1

    def ignored(self, path: str, what: str, count: int) -> None:
        self._ignored[path, what] += count

    async def text(self) -> str:
        body, _ = await self.answer()
        return body.decode()

    async def answer(self, accept: str = "") -> Answer:
        """Return all metrics in the format of an HTTP ``Accept`` header."""
        async with self._lock:
            system = self._system()
            self.counters.forget_failed_loads()
            snapshot = Snapshot(
                status=system.status(),
                requests=system.count_requests(),
                counters=self.counters,
                lag=self._lag.seen,
                answers=self._answers,
                ignored=self._ignored,
                process=process.read(),
                started_at=self._started_at,
            )
            samples = samples_of(snapshot)
            return await self._run_in_thread(lambda: _encoded(samples, accept))


def _encoded(samples: Samples, accept: str) -> Answer:
    from kvd.metrics.families import encoded  # noqa: PLC0415 - 2 MB that only scrapes need

    return encoded(samples, accept)
