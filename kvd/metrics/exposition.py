"""What a scrape gets: a snapshot of the running system, as text in the format that it asks for."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from kvd.metrics import process, text
from kvd.metrics.gather import Snapshot, samples_of
from kvd.metrics.lag import Lag
from kvd.metrics.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.jobs import Stage
    from protocol.types import DaemonStatus


class Observed(Protocol):
    """What is asked of a system (`actors.system`)."""

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        ...

    def status(self) -> DaemonStatus:
        """Return the newest snapshots."""
        ...

    def census(self) -> Mapping[tuple[str, Stage], int]:
        """Count requests by model and what they do."""
        ...

    def knows(self, model: str) -> bool:
        """Return whether there is such a model."""
        ...


class Exposition:
    """All that a daemon measures: give ``tally`` to its system, and `start` when that runs."""

    def __init__(self, system: Callable[[], Observed]) -> None:
        self.tally = Tally(lambda model: system().knows(model))
        self._system = system
        self._lag = Lag(lambda: system().busy)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._started_at = time.time()

    def start(self) -> None:
        """Begin to measure the event loop, which runs now."""
        self._lag.start()

    def stop(self) -> None:
        """End that."""
        self._lag.stop()

    def answered(self, path: str, status: int) -> None:
        """Count an answer of HTTP."""
        self._answers[path, status] += 1

    def text(self, *, openmetrics: bool = False) -> str:
        """Return all that is known now."""
        snapshot = Snapshot(
            status=self._system().status(),
            requests=self._system().census(),
            tally=self.tally,
            lag=self._lag.seen,
            answers=self._answers,
            process=process.read(),
            started_at=self._started_at,
        )
        return text.write(samples_of(snapshot), openmetrics=openmetrics)

    def answer(self, accept: str = "") -> tuple[bytes, str]:
        """Return a body and its content type, for a client that accepts this (HTTP's Accept)."""
        openmetrics = "application/openmetrics-text" in accept
        kind = text.OPEN if openmetrics else text.PLAIN
        return self.text(openmetrics=openmetrics).encode(), kind
