"""The governor: readings, wishes and offers in; what workers shall give back out. Pure.

What it does with every event, in this order:

1. models idle past their time are unloaded;
2. a wish that has waited for `Times.due_s` becomes the ledger's first: nobody else grows before it;
3. a load that cannot be granted is refused, with the arithmetic;
4. the gauge says whether memory is tight, and where new rows start;
5. what is to be freed, and for whom, the most urgent first (`room.needs`); the cheapest rung that
   has something to give does it (`actors.machines.reclaim_order`). What is on its way is waited
   for: at most one `Reclaim` runs in a worker, and nobody pays for what another is giving already;
6. where no rung helps the first wish for `Times.turn_s`, models that are in use are *held*: new
   requests for them wait, those they have run to their end, and then they are idle.

**Nobody starves.** A wish that can be met at all becomes the first one after those that are older;
then nobody else grows, rows end (their memory was reserved when they began), and who could go on
for ever by replacing rows by new ones is held. So all others come to run nothing, and what such
models have is within reach. **Nobody is aborted**: no command here ends a request.

Does not cover: the ledger (`actors.machines.ledger`), how a worker frees (`kvd.worker`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import fairness, intake, loads, pressure, reclaiming
from actors.machines.governing.state import GovernorState
from actors.machines.model_accounts import GRACE_S

if TYPE_CHECKING:
    from actors.machines.governor_events import Command, Event


class Governor(GovernorState):
    """The whole machine."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event and return what is to be done."""
        commands = intake.take(self, event, now)
        reclaiming.forget_late(self, now)
        commands += reclaiming.expire(self, now)  # (1)
        commands += reclaiming.hurry(self)
        commands += fairness.name_first(self, now)  # (2)
        commands += loads.refuse_loads(self, now)  # (3)
        commands += pressure.look(self, now)  # (4)
        acted = reclaiming.climb(self, now)  # (5)
        commands += acted
        commands += fairness.turn(self, now, idle=not acted)  # (6)
        self._wind_up(now)
        return commands

    def check(self) -> None:
        """Check the invariants."""
        self.ledger.check()
        for name, account in self.accounts.items():
            assert account.name == name, "a tenant under another's name"
            assert account.open is None or account.state != "loading", "a load gives nothing back"
            assert not account.held or self.held_for not in {None, name}, "held for nobody"
        assert set(self.ledger.grants) <= set(self.accounts), "a grant to nobody"
        assert set(self.ledger.waiting) <= set(self.accounts), "a wish of nobody"

    def _wind_up(self, now: float) -> None:
        """Say when to look again."""
        accounts = self.accounts.values()
        works = self.gauge.tight or self.ledger.waiting or self.ledger.available_bytes < 0
        if works or any(it.open for it in accounts):
            new = any(now - (it.since or 0.0) < self.times.settle_s for it in self.ledger.queue)
            self.deadline = now + (self.times.settle_s if new else self.times.tick_s)
            return
        ends = [
            it.idle_since + max(GRACE_S, it.policy.idle_ttl_s)
            for it in accounts
            if it.is_idle and not it.policy.pinned
            if it.policy.idle_ttl_s is not None and it.idle_since is not None
        ]
        self.deadline = min(ends, default=None)
