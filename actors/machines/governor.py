"""The governor of one device: which model gives memory back, how, and when. Pure.

On every event, in this order:

1. Models that have been idle for longer than allowed are unloaded.
2. A request that has waited for `Times.due_s` becomes the ledger's first: no other model grows
   before it is granted.
3. A load that cannot be granted is refused, with the numbers.
4. The gauge decides whether memory is tight, and the precision level at which new rows start.
5. The most urgent shortfall (`governing.shortfalls`) for which something can be done is served by
   the first method of the plan that covers it (`actors.machines.reclaim_plan`). Memory that is on
   its way back counts: a worker has one `Reclaim` at a time, and no model gives what another is
   giving already.
6. If no method helps the first request for `Times.hold_s`, models in use are *held*: new requests
   for them wait in the daemon until their current ones are finished and the models are idle.

**No thrashing.** A model whose rows run after a time without any is *protected*: for twice the time
of its load, at least `Times.protected_s`. Its running rows may grow before the first request is
granted, and no wait of an equal model preempts it below its fair share. So models that do not fit
side by side spend at most a third of the time on loads.

**No starvation.** Every request that can be granted at all becomes the first one after the older
ones. From then on no other model grows, except the running rows of protected ones. Running rows
finish within their reservations, or their worker preempts them when they need more. Models that
replace finished rows by new ones are held. So all other models become idle, or run no row, and
their memory can be reclaimed. **No aborts**: no command of the governor ends a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import fairness, intake, loads, pressure, reclaiming
from actors.machines.governing.state import GovernorState
from actors.machines.model_accounts import GRACE_S

if TYPE_CHECKING:
    from actors.machines.governor_events import Command, Event


class Governor(GovernorState):
    """The governor's state machine."""

    def handle(self, event: Event, now: float) -> list[Command]:
        return [*intake.apply(self, event, now), *self.react(now)]

    def react(self, now: float) -> list[Command]:
        """Act on what has changed: in this device's accounts, or at another device of a model."""
        commands = fairness.note_protected(self, now)
        reclaiming.forget_overdue(self, now)
        commands += reclaiming.evict_expired(self, now)  # (1)
        commands += reclaiming.requeue_stranded(self)
        commands += fairness.choose_first(self, now)  # (2)
        commands += loads.refuse_loads(self, now)  # (3)
        commands += pressure.update_start_levels(self, now)  # (4)
        reclaimed = reclaiming.serve_shortfalls(self, now)  # (5)
        commands += reclaimed
        commands += fairness.hold_or_release(self, now, idle=not reclaimed)  # (6)
        self.deadline = self._next_deadline(now)
        return commands

    def check(self) -> None:
        self.ledger.check()
        for name, account in self.accounts.items():
            assert account.name == name, "an account under another name"
            assert account.open is None or account.state != "loading", "a loading model reclaims"
        assert not self.held or self.held_for not in {None, *self.held}, "held for no other model"
        assert set(self.ledger.grants) <= set(self.accounts), "a grant without an account"
        assert set(self.ledger.waiting) <= set(self.accounts), "a request without an account"

    def _next_deadline(self, now: float) -> float | None:
        accounts, times = self.accounts.values(), self.times
        busy = self.gauge.tight or self.ledger.waiting or self.ledger.available_bytes < 0
        if busy or any(it.open for it in accounts):
            settling = any(now - (it.since or 0.0) < times.settle_s for it in self.ledger.queue)
            return now + (times.settle_s if settling else times.tick_s)
        expiries = [
            it.idle_since + max(GRACE_S, it.policy.idle_ttl_s)
            for it in accounts
            if it.is_idle and not it.policy.pinned
            if it.policy.idle_ttl_s is not None and it.idle_since is not None
        ]
        return min(expiries, default=None)
