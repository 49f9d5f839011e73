"""Measures how long an engine's steps take together."""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """Seconds that steps have taken; time between two steps does not count.

    A worker runs no step while another one has the time slice, or while its process is stopped. Run
    each step within the context. ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._passed = 0.0
        """Seconds of the steps that have ended."""
        self._began_at: float | None = None

    def __enter__(self) -> None:
        self._began_at = self._clock()

    def __exit__(self, *_: object) -> None:
        self._passed = self()
        self._began_at = None

    def __call__(self) -> float:
        if self._began_at is None:
            return self._passed
        return self._passed + self._clock() - self._began_at
