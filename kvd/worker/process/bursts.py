"""Whether a request that reaches an idle worker is followed by others at once.

On an accelerator, a prefill pass over one short prompt takes as long as one over eight. If a client
sends eight requests, the first one would get a pass of its own, and the others would wait for it. A
worker that has seen this waits `GAP_S` for the next request when it gets one again, and `MOST_S` in
all. If none comes, the next request is processed at once.
"""

from __future__ import annotations

from collections.abc import Callable

GAP_S = 0.002
"""Longest wait for the next request. The HTTP server takes about 1 ms for one."""
MOST_S = 0.012


class Bursts:
    """Decides how long an idle worker waits for requests that can share a pass.

    ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.expected = False
        """Whether other requests came during the step after the last idle time."""
        self._began = False
        """Whether no step has ended since the last idle time."""

    def begin(
        self, before: int, received: Callable[[], int], receive: Callable[[float], None]
    ) -> None:
        """Receive more requests, if any are expected; the first one has ended an idle time.

        ``received()``: number of requests so far; ``before`` that one, it was ``before``.
        ``receive(seconds)`` waits for requests, and returns early if one comes.
        """
        self._began = True
        if not self.expected:
            return
        end, last = self._clock() + MOST_S, before
        while last < received() and self._clock() < end:
            last = received()
            receive(GAP_S)
        self.expected = received() - before > 1

    def step_done(self, waiting: int) -> None:
        """Note how many requests have come during a step."""
        if self._began:
            self._began = False
            self.expected |= waiting > 0
