"""What every state machine here is, and the error of an illegal move.

A machine is a `msgspec.Struct`: its whole state can be written down and read back, so that
`actors.runtime.history` can replay what happened to it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from protocol.errors import InternalError

E_contra = TypeVar("E_contra", contravariant=True)
C = TypeVar("C")


class InvalidTransition(InternalError):
    """An event that is not in the table for this state; nothing has changed.

    ``story`` is what happened before, as the journal of the machine tells it.
    """

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{event!r} is not possible in {state!r}")
        self.story: list[str] = []

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.story])


class Machine(Protocol[E_contra, C]):
    """Events in, commands out; `check` raises AssertionError if the state contradicts itself."""

    def handle(self, event: E_contra, now: float) -> list[C]:
        """Take an event, change the state, and say what is to be done."""
        ...

    def check(self) -> None:
        """Check the invariants."""
        ...
