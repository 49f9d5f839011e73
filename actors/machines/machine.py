"""The interface of the state machines, and the error of an illegal transition.

`actors.runtime.history` records what happens to a machine.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from protocol.errors import InternalError

E_contra = TypeVar("E_contra", contravariant=True)
C = TypeVar("C")


class Record(msgspec.Struct, frozen=True):
    """Base of events, commands and states."""


class ModelRecord(Record, frozen=True):
    """Base of records that only name a model."""

    model: str


class RequestRecord(Record, frozen=True):
    """Base of records that only name a request."""

    rid: str


class InvalidTransition(InternalError):
    """An event that is not in the table for this state; the state did not change.

    ``story`` holds the recent history of the machine.
    """

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{event!r} is not possible in {state!r}")
        self.story: list[str] = []

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.story])


class Machine(Protocol[E_contra, C]):
    """Events in, commands out. `check` raises AssertionError if the state contradicts itself."""

    def handle(self, event: E_contra, now: float) -> list[C]: ...
    def check(self) -> None: ...
