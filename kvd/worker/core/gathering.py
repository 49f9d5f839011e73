"""Decides whether new prompts wait for others that can share their first pass.

A prefill pass over one short prompt takes an accelerator as long as a pass over eight. Clients
often send requests together, and clients whose answers end in the same step send their next ones
together. The worker reads these requests one after the other. If the first one got a pass of its
own, the others would wait for that pass. So if rows decode, a new prompt waits for others for some
milliseconds. It also waits if a thread tokenizes a request, if the head of the queue waits for
memory that was requested, or if more than one request came since the pass before::

    requests   a           b  c d e
    idle       [ pass a   ]
    decoding                . step . step [ pass b c d e ]

A wait ends with the first step at which no request has come for `GAP_S`, or `MOST_S` have passed.
Rows that decode continue meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvd.worker.device import on_cpu

GAP_S = 0.002
"""Most seconds to wait for each further request. The HTTP server takes about 1 ms per request."""
MOST_S = 0.012
"""Seconds after which the next step ends a wait, even if requests still come. If a decode step
takes this long or longer, prompts do not wait for others."""
PAUSE_S = 0.001
"""Seconds of a step in which prompts wait and no row decodes."""


class Gathering:
    """Decides which steps of an engine read no new prompts. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_on = not on_cpu()
        """Whether prompts wait at all: not on the CPU, where each token adds to a pass's time."""
        self._is_expected = False
        """Whether more than one request came between the starts of the last two passes over new
        prompts."""
        self._arrived = 0
        """Requests so far."""
        self._arrived_at = 0.0
        """When the newest request came."""
        self._read = 0
        """Requests that had come when the newest pass over new prompts began."""
        self._began_at: float | None = None
        """When the current wait began; None: no prompt waits."""

    def note_request(self) -> None:
        """Note that a request has come."""
        self._arrived += 1
        self._arrived_at = self._clock()

    def waits(self, *, new: bool, coming: bool, decode_s: float) -> bool:
        """Return whether prompts wait in this step; call it in each step.

        ``new``: whether there are prompts to prefill, and no request in prefill has begun
        (`Scheduler.has_begun_prompts`). ``coming``: whether a request is being tokenized, or needs
        memory that was requested. ``decode_s``: seconds of a decode step; 0: no row decodes.
        """
        if not (self.is_on and new):
            self._began_at = None
            return False
        now = self._clock()
        if self._began_at is None:
            self._began_at = now
        if (decode_s or coming or self._is_expected) and decode_s < MOST_S:
            quiet = now - self._arrived_at >= GAP_S and not coming
            if not quiet and now - self._began_at < MOST_S:
                return True
        self._is_expected = self._arrived - self._read > 1
        self._read, self._began_at = self._arrived, None
        return False

    def pause(self) -> None:
        """Sleep for `PAUSE_S` if prompts wait. Call it in a step without other work."""
        if self._began_at is not None:
            time.sleep(PAUSE_S)
