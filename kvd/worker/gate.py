"""Whether the worker may compute now: its side of the turns that the daemon gives. Pure.

A worker computes freely until it is told to wait, says when it has work and when it has none, and
passes a turn on after the step in which its slice ends. Knows no socket: what it returns is to be
sent. Whose turn it is, and for how long, is the daemon's (`actors.machines.turns`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.worker import TurnOver, TurnWanted

if TYPE_CHECKING:
    from protocol.types import TurnsMode
    from protocol.worker import Turn

_FREE = float("inf")
_WITHOUT = ("cpu", "none")
"""Devices that are no accelerators; the fake engine has none."""


def wanted(mode: TurnsMode, device: str) -> bool:
    """Return whether workers on this device take turns; ``device`` as in `ModelInfo`."""
    return mode == "on" or (mode == "auto" and device not in _WITHOUT)


class Gate:
    """Open, or closed until the next turn. One that is not ``on`` is open and says nothing."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._working = False
        """As the daemon knows it."""
        self._seq = 0
        self._since = 0.0
        self._until = _FREE
        self.is_open = True
        """Whether a step may begin. A turn is good for one step at least, however late it comes."""

    @property
    def is_free(self) -> bool:
        """Whether there is no end of the turn to watch for."""
        return self._until == _FREE

    def begin(self) -> TurnWanted | None:
        """Say that there is work, if that is new."""
        if self._working or not self._on:
            return None
        self._working = True
        return TurnWanted()

    def stepped(self, now: float) -> TurnOver | None:
        """Pass the turn on if its time is over."""
        return self._pass_on(now, more=True) if self.is_open and now >= self._until else None

    def rest(self, now: float) -> TurnOver | None:
        """Say that there is no more work, if that is new."""
        if not self._working:
            return None
        self._working = False
        return self._pass_on(now, more=False)

    def take(self, turn: Turn, now: float) -> TurnOver | None:
        """Take what the daemon gives; one for work that is no more goes back at once."""
        self._seq = turn.seq
        self._since = now
        self._until = _FREE if turn.slice_s is None else now + turn.slice_s
        self.is_open = turn.slice_s != 0
        if turn.slice_s and not self._working:
            return self._pass_on(now, more=False)
        return None

    def _pass_on(self, now: float, *, more: bool) -> TurnOver:
        used = 0.0
        if not self.is_free:
            used = now - self._since if self.is_open else 0.0
            self.is_open = False
        return TurnOver(seq=self._seq, used_s=used, more=more)
