"""The worker's side of time slices: decides whether it may start a step now. Pure.

A worker computes freely until the daemon makes it wait. It reports when it has work, when it has
none, and how long its steps take.

If steps are short, the worker ends a slice before the step in which it would expire. The messages
to the daemon and on to the next worker take about as long as that step, which uses the accelerator
meanwhile. The time of that step is reported at the end of the next slice. If steps are long, or if
prompts are prefilled (a long chunk may follow many short ones), the worker ends the slice after the
step, because the next worker's slice would otherwise begin while this step still computes. The
daemon decides which worker gets a slice, and how long it is (`actors.machines.time_slices`).
"""

from __future__ import annotations

from protocol.time_slices import LONG_STEP_S
from protocol.types import TimeSlicesMode
from protocol.worker import TimeSlice, TimeSliceOver, TimeSliceRequested

SHORT_S = 0.01
"""Seconds of the longest step before which a slice is ended: a few times as long as the messages
take. Longer steps leave no gap: while one is read, the next one keeps the accelerator busy."""
_DECAY = 1 / 32
"""Share by which a newer, shorter prefill step lowers the longest known one. It is small, because
many short chunks may come before the next long one."""
_UNLIMITED = float("inf")


def uses_time_slices(mode: TimeSlicesMode, device: str) -> bool:
    """Return whether workers on this device share it by time slices."""
    return mode == "on" or (mode == "auto" and is_accelerator(device))


def is_accelerator(device: str) -> bool:
    """``device``: as in `ModelInfo`."""
    return device not in ("cpu", "none")  # the fake engine has "none"


class TimeSliceGate:
    """Is open, or closed until the next time slice. Without ``on``, always open and silent."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._working = False
        """Whether the worker has work, as last reported."""
        self._prefills = False
        """Whether its steps prefill prompts, as last reported."""
        self._step_s: dict[bool, float | None] = {False: None, True: None}
        """Seconds of a step during slices, by whether steps prefill: the average for decode steps,
        the recent maximum for prefill steps."""
        self._reported_step_s: float | None = None
        self._seq = 0
        self._since = 0.0
        self._until = _UNLIMITED
        self._carried_s = 0.0
        """Seconds used after the slice was ended, reported with the next one."""
        self._step_began = 0.0
        self._is_first = False
        """Whether the next step is the first of its slice. It may be too short to
        measure, because it reads a step that was launched before the slice."""
        self.is_open = True
        """Whether a step may start. Every slice allows at least one step, however late it comes."""

    @property
    def is_unlimited(self) -> bool:
        return self._until == _UNLIMITED

    @property
    def is_timed(self) -> bool:
        """Whether step times matter: in slices, and when other workers may compute as well."""
        return not self.is_unlimited or self._reported_step_s is not None

    def request_slice(self, *, prefills: bool) -> TimeSliceRequested | None:
        """Report that there is work, unless work of the same kind (prefill or not) was reported."""
        if not self._on or (self._working and prefills == self._prefills):
            return None
        self._working, self._prefills = True, prefills
        return self._wanted()

    def before_step(self, now: float) -> TimeSliceOver | None:
        """Start a step; end the slice if the step is short and its last one."""
        self._step_began = now
        step_s = None if self._prefills else self._step_s[False]
        if step_s is None or step_s > SHORT_S or now + step_s < self._until:
            return None
        return self._end_slice(now, more=True, left_s=step_s)

    def after_step(self, now: float) -> TimeSliceOver | TimeSliceRequested | None:
        """Finish a step; end the slice if its time is over and it was not ended before the step."""
        took = now - self._step_began
        if self.is_unlimited:
            return self._request_slices(took) if took > 2 * LONG_STEP_S else None
        self._learn(took)
        if not self.is_open:
            self._carried_s += took
            return None
        return self._end_slice(now, more=True) if now >= self._until else None

    def work_done(self, now: float) -> TimeSliceOver | None:
        """Report once that no work is left."""
        if not self._working:
            return None
        self._working = False
        return self._end_slice(now, more=False)

    def apply(self, time_slice: TimeSlice, now: float) -> TimeSliceOver | None:
        """Apply the daemon's decision; a slice for work that is done is ended at once."""
        self._seq = time_slice.seq
        self._since = now
        self._until = _UNLIMITED if time_slice.slice_s is None else now + time_slice.slice_s
        self._is_first = True
        self.is_open = time_slice.slice_s != 0
        if self.is_unlimited:  # no other worker waits for this one
            self._carried_s = 0.0
        if time_slice.slice_s and not self._working:
            return self._end_slice(now, more=False)
        return None

    def _learn(self, took: float) -> None:
        known = self._step_s[self._prefills]
        if known is None:
            self._step_s[self._prefills] = took
        elif self._prefills:
            self._step_s[True] = max(took, known + (took - known) * _DECAY)
        elif not self._is_first or took > known:
            self._step_s[False] = (known + took) / 2
        self._is_first = False

    def _request_slices(self, took: float) -> TimeSliceRequested | None:
        """Report a long step, which may be due to other workers, so that slices are used again.

        The time of decode steps is then measured again. Long prefill steps may be rare, so the time
        of a prefill step is kept, and lowered slowly (`_DECAY`).
        """
        if self._reported_step_s is None:
            return None
        self._step_s[self._prefills] = took if self._prefills else None
        return self._wanted()

    def _wanted(self) -> TimeSliceRequested:
        self._reported_step_s = self._step_s[self._prefills]
        return TimeSliceRequested(step_s=self._reported_step_s)

    def _end_slice(self, now: float, *, more: bool, left_s: float = 0.0) -> TimeSliceOver:
        used = 0.0
        if not self.is_unlimited:
            used = self._carried_s + (now - self._since if self.is_open else 0.0)
            self._carried_s = 0.0
            self.is_open = False
        self._reported_step_s = self._step_s[self._prefills]
        return TimeSliceOver(
            seq=self._seq, used_s=used, more=more, step_s=self._reported_step_s, left_s=left_s
        )
