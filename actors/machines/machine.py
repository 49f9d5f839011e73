"""The interface of the state machines, and the error of an illegal transition.

A machine is a `msgspec.Struct`: its whole state can be encoded and decoded, so that
`actors.runtime.history` can replay its history.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from protocol.errors import InternalError

E_contra = TypeVar("E_contra", contravariant=True)
C = TypeVar("C")


class InvalidTransition(InternalError):
    """An event that is not in the table for this state; the state did not change.

    ``story`` holds the recent history from the machine's journal.
    """

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{event!r} is not possible in {state!r}")
        self.story: list[str] = []

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.story])


class Machine(Protocol[E_contra, C]):
    """Events in, commands out."""

    def handle(self, event: E_contra, now: float) -> list[C]:
        """Update the state and return the commands that follow."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        ...
