"""Decides whether an idle worker that gets a request waits for more before its first pass.

On an accelerator, a prefill pass over eight short prompts takes as long as a pass over one. If a
client sends eight requests at once, the first one would get a pass of its own, and the others would
wait for that pass. So if requests arrive during the first step after an idle time, the worker
expects a burst after the next one. It then waits up to `GAP_S` for each further request, and up to
`MOST_S` in all. If none arrives, it does not wait the next time.
"""

from __future__ import annotations

from collections.abc import Callable

GAP_S = 0.002
"""Most seconds to wait for each further request. The HTTP server takes about 1 ms per request."""
MOST_S = 0.012
"""Most seconds to wait in all."""


class Bursts:
    """Decides how long an idle worker waits for requests that can share a pass.

    ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.expected = False
        """Whether to wait when a request ends the next idle time: after the last one that did,
        other requests arrived during the wait or during the first step."""
        self.is_first_step = False
        """Whether no step has read prompts since `begin`."""

    def begin(
        self, before: int, received: Callable[[], int], receive: Callable[[float], None]
    ) -> None:
        """Receive more requests if a burst is expected. Call it after a request ended an idle time.

        ``received()`` returns the number of requests so far. ``before``: that number before the
        request. ``receive(seconds)`` returns when a request has arrived, or after this time.
        """
        self.is_first_step = True
        if not self.expected:
            return
        end, last = self._clock() + MOST_S, before
        while last < received() and self._clock() < end:
            last = received()
            receive(GAP_S)
        self.expected = received() - before > 1

    def step_done(self, waiting: int) -> None:
        """Note what came during the first step. ``waiting``: requests that are not handled yet."""
        self.is_first_step = False
        self.expected |= waiting > 0
