"""The governor's shell: hands wishes to the ledger and its answers to the workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors.machines import governor as machine
from actors.mail import GrantAsked, Granted, MemoryFree
from actors.runtime.actor import Actor
from actors.runtime.journal import Journal
from protocol.worker import Grant

if TYPE_CHECKING:
    from actors.mail import GovernorMail, WorkerMail
    from actors.runtime.actor import Ref


@dataclass
class Ledger:
    """What outlives a restart of the governor."""

    machine: machine.Governor
    workers: dict[str, tuple[Ref[WorkerMail], int]] = field(default_factory=dict)
    """Who asked last for each model, and in which life of its process."""

    def __post_init__(self) -> None:
        self.journal: Journal[machine.Event, machine.Command] = Journal(self.machine)


class Governor(Actor["GovernorMail"]):
    """Grants memory before it is taken."""

    def __init__(self, ledger: Ledger) -> None:
        ledger.machine.check()
        self._ledger = ledger

    def receive(self, message: GovernorMail) -> None:
        """Handle a message."""
        match message:
            case GrantAsked():
                self._ledger.workers[message.model] = (message.worker, message.life)
                self._do(machine.Wanted(message.model, message.seq, message.total_bytes))
            case MemoryFree(model=model):
                self._ledger.workers.pop(model, None)
                self._do(machine.Released(model))
            case _:
                assert_never(message)

    def check(self) -> None:
        """Check the invariants."""
        self._ledger.machine.check()

    def _do(self, event: machine.Event) -> None:
        now = asyncio.get_running_loop().time()
        for answer in self._ledger.journal.handle(event, now):
            worker, life = self._ledger.workers[answer.model]
            grant = Grant(
                seq=answer.seq,
                total_bytes=answer.total_bytes,
                granted=answer.granted,
                available_bytes=answer.available_bytes,
                budget_bytes=self._ledger.machine.budget_bytes,
            )
            worker.tell(Granted(grant, life))
