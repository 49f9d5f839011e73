"""A week of mixed traffic: five models, a budget for two, the governor's machine for real.

The ladder is the daemon's own. Workers keep its contract (`tests.sim.keeper`), a house around them
brings requests to them, loads on demand, evicts, holds and replays what a crash has cost. Words
take their time both ways, users pin models and change the budget, the system complains, workers
take more than they were granted. Every rule that is promised is asserted after every event.

A seed replays: ``python -m tests.sim.week SEED``; ``FIRST LAST`` runs many and prints the counts,
and the names of files with such counts add them up.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.machines import governor_events
from actors.machines.governor import Governor
from actors.machines.ledger import GrantDecision, Ledger, MemoryRequest, WorkerExited
from protocol.policy import ModelPolicy
from tests.sim.keeper import AGAIN, Asked, Keeper, Kind

HOUR, DAYS = 3600.0, 7
BUDGET = 6000
LINK_S = 0.02
"""What a word takes on its way."""
KINDS = (
    Kind("chat", 2200, (60, 45, 32), 20, 40),
    Kind("code", 2600, (80, 60, 42), 30, 30),
    Kind("tiny", 500, (20, 15, 10), 4, 120),
    Kind("wide", 3200, (150, 110, 76), 45, 20),
    Kind("talk", 1500, (50, 50, 30), 12, 60),
)
RECLAIM_ORDER = ("spare", "prefixes", "expired", "precision", "idle", "preempt")
LONGEST_S = 4 * HOUR
"""From a request's arrival to its end, whoever else wants what."""
ACTIONS = 12
"""At most so many commands to workers for each request, and as many for each of the rest."""


@dataclass
class Seat:
    """A model that the house knows, loaded or not."""

    kind: Kind
    state: str = "asleep"
    life: int = 0
    keeper: Keeper | None = None
    line: list[Asked] = field(default_factory=list)
    """Requests that wait in the daemon."""
    held: bool = False
    pinned: bool = False
    ttl_s: float | None = None
    priority: int = 0
    offered: bool = False
    serving: bool = False


class Week:
    """One seeded week; `run` it, then look at the counts."""

    def __init__(self, seed: int, requests: int = 170) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.most_granted = 0.0
        self.longest = 0.0
        """Seconds from a request's arrival to its end."""
        self.counts: Counter[str] = Counter()
        self.governor = Governor(Ledger(BUDGET))
        self.seats = {kind.name: Seat(kind) for kind in KINDS}
        self.asked: list[Asked] = []
        self.requests = requests
        self.resized = False
        self.ceiling: int | None = None
        """What the grants may be while a lowered budget is worked off."""
        self.doings = 0
        """What users and the system did beside asking."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._rings: float | None = None

    # Time.

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay, act)

    def run(self) -> None:
        self._fill()
        last = DAYS * 24 * HOUR
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
            assert self.now < last + 48 * HOUR, f"stuck: {self._stuck()}"
        self._check_the_end()

    def _stuck(self) -> str:
        left = [(it.number, it.kind.name, it.began) for it in self.asked if not it.ended]
        return f"{left[:9]} {self.governor.ledger}"

    def _fill(self) -> None:
        draw = self.draw
        names = [kind.name for kind in KINDS]
        for day in range(DAYS):
            busy = self.requests / DAYS
            for _ in range(int(busy / 2)):
                hour = draw.choice([draw.uniform(8, 20), draw.uniform(0, 24)])
                self.at((day * 24 + hour) * HOUR, lambda: self._ask(draw.choice(names)))
            for _ in range(2):
                when = (day * 24 + draw.uniform(8, 20)) * HOUR
                for _ in range(int(busy / 4)):
                    many = draw.sample(names, draw.randint(1, 5))
                    self.at(when + draw.uniform(0, 120), lambda m=many: self._ask(draw.choice(m)))
            for act in (self._crash, self._pin, self._overrun, self._press, self._configure):
                self.at((day * 24 + draw.uniform(0, 24)) * HOUR, act)
        for _ in range(3):
            self.at(draw.uniform(0, DAYS) * 24 * HOUR, self._resize)
            self.at(draw.uniform(0, DAYS) * 24 * HOUR, self._load_by_hand)
        for _ in range(2 * DAYS):
            self.at(draw.uniform(0, DAYS) * 24 * HOUR, self._unload)

    # People and the system.

    def _ask(self, name: str) -> None:
        draw, seat = self.draw, self.seats[name]
        prompt = draw.choice([20, 200, 1000, 4000, 12_000])
        length = draw.choice([20, 100, 400, 2000])
        asked = Asked(len(self.asked), seat.kind, prompt, length, self.now)
        self.asked.append(asked)
        seat.line.append(asked)
        self._forward(seat)
        if seat.state == "asleep":
            self._board(seat, patient=True)

    def _crash(self) -> None:
        alive = [it for it in self.seats.values() if it.keeper is not None]
        if alive:
            self.counts["crashed"] += 1
            self._gone(self.draw.choice(alive), crashed=True)

    def _pin(self) -> None:
        self.doings += 1
        for seat in self.seats.values():
            seat.pinned = False
        small = [it for it in self.seats.values() if it.kind.base < BUDGET / 4]
        chosen = self.draw.choice(small)
        chosen.pinned = self.draw.random() < 0.7
        for seat in self.seats.values():
            self._tell(governor_events.PolicyChanged(seat.kind.name, self._policy(seat)))

    def _configure(self) -> None:
        self.doings += 1
        seat = self.draw.choice(list(self.seats.values()))
        seat.ttl_s = self.draw.choice([None, 300.0, 3600.0])
        seat.priority = self.draw.choice([0, 0, 1, -1])
        self._tell(governor_events.PolicyChanged(seat.kind.name, self._policy(seat)))

    def _policy(self, seat: Seat) -> ModelPolicy:
        return ModelPolicy(priority=seat.priority, pinned=seat.pinned, idle_ttl_s=seat.ttl_s)

    def _overrun(self) -> None:
        """A worker takes more than it was granted, for a minute."""
        self.doings += 1
        alive = [it for it in self.seats.values() if it.keeper is not None]
        if not alive:
            return
        name = self.draw.choice(alive).kind.name
        held = self.governor.ledger.grants.get(name, 0)
        self._tell(governor_events.MemoryMeasured({name: held + self.draw.randint(0, 400)}))
        self.later(60, lambda: self._tell(governor_events.MemoryMeasured({name: 0})))

    def _press(self) -> None:
        self.doings += 1
        self._tell(governor_events.MemoryMeasured({}, self.draw.choice(["warning", "critical"])))
        self.later(60, lambda: self._tell(governor_events.MemoryMeasured({})))

    def _resize(self) -> None:
        self.doings += 1
        self.resized = True
        self._tell(governor_events.BudgetChanged(self.draw.randint(4200, 7000)))
        self.later(HOUR, lambda: self._tell(governor_events.BudgetChanged(BUDGET)))

    def _load_by_hand(self) -> None:
        seat = self.draw.choice(list(self.seats.values()))
        if seat.state == "asleep":
            self._board(seat, patient=False)

    def _unload(self) -> None:
        """A user wants a model gone: it finishes what it has."""
        ready = [it for it in self.seats.values() if it.state == "ready"]
        if ready:
            self.doings += 1
            seat = self.draw.choice(ready)
            seat.state = "draining"
            self.counts["unloaded"] += 1
            self._tell(governor_events.UnloadStarted(seat.kind.name))
            self._end_if_drained(seat)

    # The house: the supervisor's and the router's part.

    def _board(self, seat: Seat, *, patient: bool) -> None:
        seat.state = "loading"
        seat.life += 1
        life = seat.life
        self._tell(governor_events.LoadRequested(seat.kind.name, self._policy(seat), patient))
        self.later(1.0, lambda: self._started(seat, life))

    def _started(self, seat: Seat, life: int) -> None:
        if seat.life == life and seat.state == "loading":
            keeper = seat.keeper = Keeper(
                seat.kind, lambda kind, it: self._up(seat, life, kind, it)
            )
            keeper._ask(seat.kind.base)

    def _answer(self, seat: Seat, life: int, it: GrantDecision, budget: int) -> None:
        keeper = seat.keeper
        if keeper is None or seat.life != life:
            return
        keeper.answered(it.seq, it.total_bytes, budget, granted=it.granted)
        if seat.state != "loading":
            self._work(seat)
        elif not it.granted:
            self.counts["load refused"] += 1
            self._gone(seat, crashed=False, refused=True)
        elif it.total_bytes == seat.kind.base:
            self.later(seat.kind.load_s, lambda: self._weights(seat, life))
        else:
            self._ready(seat)

    def _weights(self, seat: Seat, life: int) -> None:
        if seat.life == life and seat.state == "loading" and seat.keeper is not None:
            seat.keeper._ask(seat.kind.base + seat.kind.first)

    def _ready(self, seat: Seat) -> None:
        self.counts["loaded"] += 1
        seat.state = "ready"
        self._tell(governor_events.ModelReady(seat.kind.name))
        self._forward(seat)
        self._offer(seat)

    def _forward(self, seat: Seat) -> None:
        if seat.state == "ready" and not seat.held and seat.line:
            assert seat.keeper is not None
            for asked in seat.line:
                seat.keeper.submit(asked)
            seat.line.clear()
            self._work(seat)

    def _evict(self, seat: Seat, *, requeue: bool) -> None:
        """Drain, as it is said to be idle; a request may have come meanwhile."""
        if requeue:
            assert seat.state in {"ready", "draining"}
            self.counts["requeued"] += 1
            self._gone(seat, crashed=False, requeue=True)
            return
        if seat.state == "loading":
            self.counts["stuck"] += 1
            self._gone(seat, crashed=False)
            return
        seat.state = "draining"
        self.counts["evicted"] += 1
        self._end_if_drained(seat)

    def _end_if_drained(self, seat: Seat) -> None:
        if seat.state == "draining" and seat.keeper is not None and seat.keeper.idle:
            life = seat.life
            self.later(0.5, lambda: seat.life == life and self._gone(seat, crashed=False))

    def _gone(
        self, seat: Seat, *, crashed: bool, refused: bool = False, requeue: bool = False
    ) -> None:
        """The process is gone; what a crash has cost is replayed."""
        keeper = seat.keeper
        seat.life += 1
        seat.keeper, seat.serving = None, False
        if keeper is not None:
            assert crashed or keeper.idle or requeue, "what is in flight was aborted"
            assert not (requeue and keeper.running), "a row that ran had to begin anew"
            lost = [*keeper.running, *keeper.queue]
            seat.line = [*sorted(lost, key=lambda it: it.number), *seat.line]
        seat.state = "asleep"
        self._tell(WorkerExited(seat.kind.name))
        if refused:
            for asked in seat.line:
                self._refused(asked)
            seat.line.clear()
        if seat.line or crashed:
            self._board(seat, patient=True)

    def _refused(self, asked: Asked) -> None:
        kind = asked.kind
        least = kind.base + kind.first
        assert least > self.governor.limit_of(kind.name), "refused for a moment's sake"
        asked.ended = "refused"

    # Between daemon and worker.

    def _up(self, seat: Seat, life: int, kind: str, it: dict[str, object]) -> None:
        """A word of a worker's, with what it could give back at that moment."""
        keeper = seat.keeper
        reclaimable = (
            keeper.reclaimable() if keeper is not None and seat.state != "loading" else None
        )
        self.later(LINK_S, lambda: self._heard(seat, life, kind, it, reclaimable))

    def _heard(self, seat: Seat, life: int, kind: str, it: dict, reclaimable: object) -> None:
        if seat.life != life:
            return
        name = seat.kind.name
        if reclaimable is not None:
            self._tell(governor_events.ReclaimableReported(name, reclaimable))
        if kind == "wanted":
            self._tell(MemoryRequest(name, it["seq"], it["total"], it["resuming"]))
        elif kind == "reclaimed":
            self._tell(
                governor_events.ReclaimFinished(name, it["seq"], it["freed"], it["exhausted"])
            )

    def _offer(self, seat: Seat) -> None:
        """Counters are told four times a second at most."""
        if not seat.offered:
            seat.offered = True
            self.later(0.25, lambda: self._offers(seat, seat.life))

    def _offers(self, seat: Seat, life: int) -> None:
        seat.offered = False
        if seat.keeper is not None and seat.state != "loading":
            self._up(seat, seat.life, "offered", {})

    def _tell(self, event: governor_events.Event) -> None:
        """Give the machine an event, and do what it says."""
        self.steps += 1
        commands = self.governor.handle(event, self.now)
        self._check(commands)
        for command in commands:
            self._do(command)
        self._alarm()

    def _alarm(self) -> None:
        due = self.governor.deadline
        if due is not None and (self._rings is None or due < self._rings):
            self._rings = due
            self.at(due, self._ring)

    def _ring(self) -> None:
        if self._rings is not None and self.now >= self._rings:
            self._rings = None
            due = self.governor.deadline
            if due is not None and due <= self.now:
                self._tell(governor_events.AlarmFired())
            else:
                self._alarm()

    def _do(self, command: governor_events.Command) -> None:
        match command:
            case GrantDecision():
                seat, budget = self.seats[command.model], self.governor.limit_of(command.model)
                life = seat.life
                self.later(LINK_S, lambda: self._answer(seat, life, command, budget))
            case governor_events.Reclaim():
                self.counts[f"reclaim {command.method}"] += 1
                seat = self.seats[command.model]
                life = seat.life
                self.later(LINK_S, lambda: self._reclaim(seat, life, command))
            case governor_events.StartLevel():
                self.counts["start level"] += 1
                seat = self.seats[command.model]
                if seat.keeper is not None:
                    seat.keeper.level = command.level
            case governor_events.Evict():
                self._evict(self.seats[command.model], requeue=command.requeue)
            case governor_events.HoldRequests():
                self.counts["held"] += command.held
                seat = self.seats[command.model]
                seat.held = command.held
                self.later(0.0, lambda: self._forward(seat))
            case governor_events.RecordEvent():
                self.counts[f"noted {command.kind}"] += 1

    def _reclaim(self, seat: Seat, life: int, command: governor_events.Reclaim) -> None:
        if seat.keeper is None or seat.life != life:
            return
        paused = seat.keeper.reclaim(command)
        self.counts["parked"] += len(paused)
        for asked in paused:
            self._stop(asked)
        self._work(seat)

    # The worker's time.

    def _work(self, seat: Seat) -> None:
        keeper = seat.keeper
        if keeper is None:
            return
        while (head := keeper.hopeless()) is not None:
            least = head.kind.base + head.size(2)
            assert least > self.governor.limit_of(head.kind.name) or self.counts["noted budget"]
            keeper.drop(head)
            head.ended = "refused"
            self.counts["refused"] += 1
        for asked in keeper.admit():
            self._run(seat, asked)
        self._serves(seat)
        self._offer(seat)
        self._end_if_drained(seat)

    def _serves(self, seat: Seat) -> None:
        busy = seat.keeper is not None and not seat.keeper.idle
        if busy != seat.serving:
            seat.serving = busy
            self._tell(governor_events.ServingChanged(seat.kind.name, busy))

    def _run(self, seat: Seat, asked: Asked) -> None:
        asked.began = self.now
        life, parks = seat.life, asked.parks
        left = (asked.length - asked.made) / asked.kind.tokens_per_s + asked.prompt / 2000
        self.later(left, lambda: self._finish(seat, life, asked, parks))

    def _stop(self, asked: Asked) -> None:
        """It was parked: what it made stays made."""
        ran = self.now - (asked.began or self.now) - asked.prompt / 2000
        made = max(0, min(asked.length - 1 - asked.made, int(ran * asked.kind.tokens_per_s)))
        asked.made += made

    def _finish(self, seat: Seat, life: int, asked: Asked, parks: int) -> None:
        if seat.life != life or asked.parks != parks or seat.keeper is None:
            return
        asked.made, asked.ended = asked.length, "finished"
        self.longest = max(self.longest, self.now - asked.arrived)
        self.counts["finished"] += 1
        seat.keeper.finish(asked)
        self._work(seat)

    # What is promised.

    def _check(self, commands: list[governor_events.Command]) -> None:
        ledger = self.governor.ledger
        self.governor.check()
        most = max(ledger.budget_bytes, ledger.ceiling_bytes)
        assert ledger.granted_bytes <= most, "more granted than there is"
        assert self.ceiling is None or ledger.granted_bytes <= self.ceiling, "it was to fall only"
        over = ledger.granted_bytes > ledger.budget_bytes
        assert not over or self.resized, "the budget was exceeded"
        self.ceiling = ledger.granted_bytes if over else None
        self.most_granted = max(self.most_granted, ledger.granted_bytes / ledger.budget_bytes)
        for name, seat in self.seats.items():
            if seat.keeper is not None and seat.state != "loading":
                assert seat.keeper.held <= seat.keeper.grant, "more held than granted"
                assert seat.keeper.grant <= ledger.grants[name], "a grant that nobody gave"
        for command in commands:
            if isinstance(command, governor_events.RecordEvent) and command.kind.startswith(
                "reclaim_"
            ):
                self._check_order(command)

    def _check_order(self, note: governor_events.RecordEvent) -> None:
        """No rung is used while a cheaper one has something that nobody asks for yet."""
        method = note.kind.removeprefix("reclaim_")
        least = self.governor.view(self.now).min_bytes
        for account in self.governor.accounts.values():
            if account.state != "ready" or account.open is not None:
                continue
            others, barren, reclaimable = (
                account.name != note.requester,
                account.barren,
                account.reclaimable,
            )
            if method != "spare" and others and "spare" not in barren:
                assert reclaimable.spare < least, f"{method} before spare memory"
            if method not in {"spare", "prefixes"} and others and "prefixes" not in barren:
                assert reclaimable.prefixes < least, f"{method} before prefixes"
            if method == "preempt" and "precision" not in barren and not account.is_idle:
                assert max(reclaimable.levels, default=0) < least, "parked before stepped down"
            if method == "preempt" and others:
                assert not account.is_evictable(self.now), "parked before evicted"

    def _check_the_end(self) -> None:
        for asked in self.asked:
            assert asked.ended, f"{asked.number} never ended"
        assert self.longest < LONGEST_S, f"somebody waited for {self.longest:.0f} s"
        for asked in self.asked:
            assert asked.parks <= 1 + asked.length // AGAIN, "parked again and again"
        causes = len(self.asked) + self.doings + self.counts["crashed"]
        steps = sum(self.counts[it] for it in self.counts if it.startswith("reclaim "))
        steps += self.counts["evicted"] + self.counts["held"] + self.counts["stuck"]
        steps += self.counts["requeued"]
        self.counts["steps"] = steps
        assert steps <= ACTIONS * causes, f"{steps} steps for {causes} causes"
        self.counts["events"] = self.steps


def summary(first: int, last: int) -> dict[str, Any]:
    """Run the seeds, and say what they came to."""
    total: Counter[str] = Counter()
    began, steps, longest = time.perf_counter(), [], 0.0
    for seed in range(first, last + 1):
        week = Week(seed)
        try:
            week.run()
        except BaseException:
            sys.stderr.write(f"seed {seed} at {week.now:.3f} s, {week.steps} events\n")
            raise
        total.update(week.counts)
        steps.append(week.steps)
        longest = max(longest, week.longest)
    return {
        "command": "python -m tests.sim.week FIRST LAST > PIECE; python -m tests.sim.week PIECE...",
        "seeds": last - first + 1,
        "pieces": [[first, last]],
        "events": sum(steps),
        "least_events": min(steps),
        "most_events": max(steps),
        "longest_request_s": round(longest),
        "seconds": round(time.perf_counter() - began, 1),
        "counts": dict(sorted(total.items())),
    }


MERGED = {"least_events": min, "most_events": max, "longest_request_s": max}


def merge(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several runs as one."""
    whole = dict(pieces[0])
    for piece in pieces[1:]:
        counts = Counter(whole["counts"]) + Counter(piece["counts"])
        for key, value in piece.items():
            if key in MERGED:
                whole[key] = MERGED[key](whole[key], value)
            elif key not in {"command", "counts"}:
                whole[key] = whole[key] + value
        whole["counts"] = dict(sorted(counts.items()))
    whole["seconds"] = round(whole["seconds"], 1)
    whole["events_per_seed"] = round(whole["events"] / whole["seeds"])
    return whole


def main(arguments: list[str]) -> None:
    """Run the seeds that are named by numbers, or merge the runs that are named by files."""
    if arguments[0].isdecimal():
        found = summary(int(arguments[0]), int(arguments[-1]))
    else:
        found = merge([json.loads(Path(name).read_text()) for name in arguments])
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
