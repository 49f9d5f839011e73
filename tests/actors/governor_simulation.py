"""A governor with a simulated clock, for the tests of each of its parts."""

from __future__ import annotations

from actors.machines import governor_events
from actors.machines.governor import Governor
from actors.machines.governor_events import (
    AlarmFired,
    LoadRequested,
    ModelReady,
    Reclaim,
    ReclaimableReported,
    ReclaimFinished,
)
from actors.machines.ledger import Ledger, MemoryRequest
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable

BUDGET = 10_000
BUSY = {"rows": 1, "waiting": 1, "base": 2000}
"""Counters that a model in use reports with its reclaimable bytes."""


class Simulation:
    """A governor with a simulated clock. Keeps all commands that the governor returned."""

    def __init__(self, **models: int) -> None:
        self.governor = Governor(Ledger(BUDGET))
        self.now = 1000.0
        self.commands_seen: list[governor_events.Command] = []
        self.seqs: dict[str, int] = {}
        for name, granted in models.items():
            self.load(name, granted)

    def apply(
        self, event: governor_events.Event, after: float = 0.0
    ) -> list[governor_events.Command]:
        self.now += after
        commands = self.governor.handle(event, self.now)
        self.governor.check()
        self.commands_seen += commands
        return [it for it in commands if not isinstance(it, governor_events.RecordEvent)]

    def load(self, name: str, granted: int, policy: ModelPolicy | None = None) -> None:
        self.apply(LoadRequested(name, policy or ModelPolicy()))
        self.request(name, granted)
        self.apply(ModelReady(name))
        self.now += 5.0

    def request(
        self, name: str, total: int, *, resuming: bool = False
    ) -> list[governor_events.Command]:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        return self.apply(MemoryRequest(name, self.seqs[name], total, resuming))

    def reclaimable(self, name: str, **fields: object) -> list[governor_events.Command]:
        return self.apply(ReclaimableReported(name, Reclaimable(**fields)))

    def wait(self, seconds: float) -> list[governor_events.Command]:
        """Advance the clock and fire the alarms that are due."""
        end, commands = self.now + seconds, []
        while (due := self.governor.deadline) is not None and due <= end:
            commands += self.apply(AlarmFired(), max(0.0, due - self.now))
        self.now = end
        return commands + self.apply(AlarmFired())

    def give_back(
        self, it: Reclaim, freed: int, *, exhausted: bool = False
    ) -> list[governor_events.Command]:
        answers = self.request(it.model, self.grants[it.model] - freed)
        return answers + self.apply(ReclaimFinished(it.model, it.seq, freed, exhausted))

    @property
    def grants(self) -> dict[str, int]:
        return self.governor.ledger.grants

    def recorded(self, kind: str) -> governor_events.RecordEvent:
        return next(
            it
            for it in self.commands_seen
            if isinstance(it, governor_events.RecordEvent) and it.kind == kind
        )


def of_type(commands: list[governor_events.Command], kind: type) -> list:
    return [it for it in commands if isinstance(it, kind)]
