"""Whether the worker may compute now: its side of the turns that the daemon gives. Pure.

A worker computes freely until it is told to wait, says when it has work and when it has none, and
what its steps take. It passes a turn on before the step in which its slice will end: the way to the
daemon and from there to the next worker takes as long as a short step, and the accelerator has one
in flight meanwhile. What that step then takes is measured like all others and told with the next
turn's end. Others would wait behind a long one in vain: then the turn is passed on after it, and
so it is where prompts are read, whose next chunk may be a long one after many short. Knows no
socket: what it returns is to be sent. Whose turn it is, and for how long, is the daemon's
(`actors.machines.time_slices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.worker import LONG_STEP_S, TimeSliceOver, TimeSliceRequested

if TYPE_CHECKING:
    from protocol.types import TimeSlicesMode
    from protocol.worker import TimeSlice

SHORT_S = 0.01
"""Of a step, that the next worker may begin beside: some times what passing on takes. While a
longer one is read, the next is in flight for long enough."""
_FORGOTTEN = 1 / 32
"""Of what the longest chunk took more than this one: the next long one may be some time off."""
_FREE = float("inf")
_WITHOUT = ("cpu", "none")
"""Devices that are no accelerators; the fake engine has none."""


def wanted(mode: TimeSlicesMode, device: str) -> bool:
    """Return whether workers on this device take turns; ``device`` as in `ModelInfo`."""
    return mode == "on" or (mode == "auto" and device not in _WITHOUT)


class Gate:
    """Open, or closed until the next turn. One that is not ``on`` is open and says nothing."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._working = False
        """As the daemon knows it."""
        self._reads = False
        """Whether steps read prompts."""
        self._steps: dict[bool, float | None] = {False: None, True: None}
        """What a step takes in a turn of ours, by whether it reads prompts: the average where it
        does not, the most of late where it does."""
        self._told: float | None = None
        """Of these, as the daemon knows it."""
        self._seq = 0
        self._since = 0.0
        self._until = _FREE
        self._carried = 0.0
        """Used after its turn was passed on, and not told yet."""
        self._began = 0.0
        self._is_first = False
        """Whether a step is the first of its turn: what it waits for was in flight before."""
        self.is_open = True
        """Whether a step may begin. A turn is good for one step at least, however late it comes."""

    @property
    def is_free(self) -> bool:
        """Whether there is no end of the turn to watch for."""
        return self._until == _FREE

    @property
    def is_timed(self) -> bool:
        """Whether steps are to be told: in turns, and where others may compute at the same time."""
        return self._until != _FREE or self._told is not None

    def begin(self, *, reads: bool) -> TimeSliceRequested | None:
        """Say that there is work, if that is new, or of another kind; ``reads``: prompts."""
        if not self._on or (self._working and reads == self._reads):
            return None
        self._working, self._reads = True, reads
        return self._want()

    def stepping(self, now: float) -> TimeSliceOver | None:
        """Begin a step; pass the turn on if it is a short one and the last."""
        self._began = now
        step_s = None if self._reads else self._steps[False]
        if step_s is None or step_s > SHORT_S or now + step_s < self._until:
            return None
        return self._pass_on(now, more=True, left_s=step_s)

    def stepped(self, now: float) -> TimeSliceOver | TimeSliceRequested | None:
        """End a step; pass the turn on if its time is over and nobody knew before."""
        took = now - self._began
        if self.is_free:
            return self._doubt(took) if took > 2 * LONG_STEP_S else None
        self._learn(took)
        if not self.is_open:
            self._carried += took
            return None
        return self._pass_on(now, more=True) if now >= self._until else None

    def rest(self, now: float) -> TimeSliceOver | None:
        """Say that there is no more work, if that is new."""
        if not self._working:
            return None
        self._working = False
        return self._pass_on(now, more=False)

    def take(self, turn: TimeSlice, now: float) -> TimeSliceOver | None:
        """Take what the daemon gives; one for work that is no more goes back at once."""
        self._seq = turn.seq
        self._since = now
        self._until = _FREE if turn.slice_s is None else now + turn.slice_s
        self._is_first = True
        self.is_open = turn.slice_s != 0
        if self.is_free:  # others do not wait for it
            self._carried = 0.0
        if turn.slice_s and not self._working:
            return self._pass_on(now, more=False)
        return None

    def _learn(self, took: float) -> None:
        known = self._steps[self._reads]
        if known is None:
            self._steps[self._reads] = took
        elif self._reads:
            self._steps[True] = max(took, known + (took - known) * _FORGOTTEN)
        elif not self._is_first or took > known:
            self._steps[False] = (known + took) / 2
        self._is_first = False

    def _doubt(self, took: float) -> TimeSliceRequested | None:
        """Ask for turns: steps are long, be it for those who compute at the same time.

        What they take alone is measured anew; among chunks the long ones may be rare, so that this
        one counts until it is forgotten.
        """
        if self._told is None:
            return None
        self._steps[self._reads] = took if self._reads else None
        return self._want()

    def _want(self) -> TimeSliceRequested:
        self._told = self._steps[self._reads]
        return TimeSliceRequested(step_s=self._told)

    def _pass_on(self, now: float, *, more: bool, left_s: float = 0.0) -> TimeSliceOver:
        used = 0.0
        if not self.is_free:
            used = self._carried + (now - self._since if self.is_open else 0.0)
            self._carried = 0.0
            self.is_open = False
        self._told = self._steps[self._reads]
        return TimeSliceOver(
            seq=self._seq, used_s=used, more=more, step_s=self._told, left_s=left_s
        )
