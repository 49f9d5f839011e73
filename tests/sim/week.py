"""Simulates a week of mixed traffic for the real governor: five models under a budget for two.

Workers keep the governor's contract (`tests.sim.sim_worker`). The simulation does the rest of the
daemon's work: it forwards requests to workers, loads on demand, evicts, holds requests and replays
requests after a crash. Messages take time both ways, users pin models and change the budget, the
system reports memory pressure, and workers use more than they were granted. Every promise is
asserted after every event. With two devices, each has a model or two, and one model is over both.

A seed always gives the same week. ``python -m tests.sim.week SEED`` runs one, and ``FIRST LAST``
a range of seeds; both print counts as JSON. With names of such JSON files it prints their sums.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.machines import governor_events
from actors.machines.governors import Governors
from actors.machines.ledger import GrantDecision, MemoryRequest, WorkerExited
from protocol.memory_bounds import HOST_BYTES
from protocol.policy import ModelPolicy
from tests.sim.sim_worker import AHEAD, MIN_TOKENS, SimModel, SimRequest, SimWorker

HOUR, DAYS = 3600.0, 7
BUDGET = 6000
LATENCY_S = 0.02
"""Seconds that a message takes between daemon and worker."""
MODELS = (
    SimModel("chat", 2200, (60, 45, 32), 20, 40),
    SimModel("code", 2600, (80, 60, 42), 30, 30),
    SimModel("tiny", 500, (20, 15, 10), 4, 120),
    SimModel("wide", 3200, (150, 110, 76), 45, 20),
    SimModel("talk", 1500, (50, 50, 30), 12, 60),
)
PLACES = {"chat": (0, 1), "code": (1, 1), "tiny": (0, 1), "wide": (0, 2), "talk": (1, 1)}
"""Device and ranks of each model, with two devices."""
LONGEST_S = 4 * HOUR
"""Limit on the seconds from a request's arrival to its end."""
MAX_COMMANDS = 6
"""Limit on the governor's commands, per request, crash, or other change by users or the system."""


@dataclass
class ModelEntry:
    """A known model, loaded or not."""

    model: SimModel
    state: str = "unloaded"
    life: int = 0
    worker: SimWorker | None = None
    queue: list[SimRequest] = field(default_factory=list)
    """Requests that wait in the daemon."""
    held: bool = False
    pinned: bool = False
    ttl_s: float | None = None
    priority: int = 0
    reporting: bool = False
    serving: bool = False
    device: int = 0
    ranks: int = 1


class Week:
    """One seeded week. `counts` has the number of each kind of event."""

    def __init__(
        self, seed: int, request_count: int = 170, devices: int = 1, processes: int | None = None
    ) -> None:
        """``processes``: how many the host's memory has room for, if devices have their own."""
        self.draw = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.most_granted = 0.0
        self.longest = 0.0
        """Most seconds from a request's arrival to its end."""
        self.counts: Counter[str] = Counter()
        host_bytes = None if processes is None else processes * HOST_BYTES
        self.governors = Governors.create(BUDGET, devices, host_bytes)
        self.entries = {model.name: ModelEntry(model) for model in MODELS}
        if devices == 2:
            self._place_on_two_devices()
        self.requests: list[SimRequest] = []
        self.request_count = request_count
        self.resized = False
        self.ceilings: list[int | None] = [None] * devices
        """By device, the limit on the sum of grants while it is above a lowered budget."""
        self.changes = 0
        """Number of things that users and the system did, except requests and crashes."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._alarm_at: float | None = None

    def _place_on_two_devices(self) -> None:
        for name, (device, ranks) in PLACES.items():
            one = self.entries[name].model
            both = replace(  # each device has as much of it as the only one has otherwise
                one,
                base=ranks * one.base,
                first=ranks * one.first,
                per_1000=tuple(ranks * size for size in one.per_1000),
            )
            self.entries[name] = ModelEntry(both, device=device, ranks=ranks)

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
        left = [(it.number, it.model.name, it.started) for it in self.requests if not it.ended]
        return f"{left[:9]} {[it.ledger for it in self.governors.devices]}"

    def _fill(self) -> None:
        draw = self.draw
        names = [model.name for model in MODELS]
        for day in range(DAYS):
            busy = self.request_count / DAYS
            for _ in range(int(busy / 2)):
                hour = draw.choice([draw.uniform(8, 20), draw.uniform(0, 24)])
                self.at((day * 24 + hour) * HOUR, lambda: self._request(draw.choice(names)))
            for _ in range(2):
                when = (day * 24 + draw.uniform(8, 20)) * HOUR
                for _ in range(int(busy / 4)):
                    many = draw.sample(names, draw.randint(1, 5))
                    self.at(
                        when + draw.uniform(0, 120), lambda m=many: self._request(draw.choice(m))
                    )
            for act in (
                self._crash,
                self._pin,
                self._exceed_grant,
                self._raise_pressure,
                self._configure,
            ):
                self.at((day * 24 + draw.uniform(0, 24)) * HOUR, act)
        for _ in range(3):
            self.at(draw.uniform(0, DAYS) * 24 * HOUR, self._resize)
            self.at(draw.uniform(0, DAYS) * 24 * HOUR, self._load_by_hand)
        for _ in range(2 * DAYS):
            self.at(draw.uniform(0, DAYS) * 24 * HOUR, self._unload)

    # Users and the system.

    def _request(self, name: str) -> None:
        draw, entry = self.draw, self.entries[name]
        prompt = draw.choice([20, 200, 1000, 4000, 12_000])
        length = draw.choice([20, 100, 400, 2000, 8000])
        request = SimRequest(len(self.requests), entry.model, prompt, length, self.now)
        self.requests.append(request)
        entry.queue.append(request)
        self._forward(entry)
        if entry.state == "unloaded":
            self._start_load(entry, patient=True)

    def _crash(self) -> None:
        alive = [it for it in self.entries.values() if it.worker is not None]
        if alive:
            self.counts["crashed"] += 1
            self._exited(self.draw.choice(alive), crashed=True)

    def _pin(self) -> None:
        self.changes += 1
        for entry in self.entries.values():
            entry.pinned = False
        small = [it for it in self.entries.values() if it.model.base < BUDGET / 4]
        chosen = self.draw.choice(small)
        chosen.pinned = self.draw.random() < 0.7
        for entry in self.entries.values():
            self._apply(governor_events.PolicyChanged(entry.model.name, self._policy(entry)))

    def _configure(self) -> None:
        self.changes += 1
        entry = self.draw.choice(list(self.entries.values()))
        entry.ttl_s = self.draw.choice([None, 300.0, 3600.0])
        entry.priority = self.draw.choice([0, 0, 1, -1])
        self._apply(governor_events.PolicyChanged(entry.model.name, self._policy(entry)))

    def _policy(self, entry: ModelEntry) -> ModelPolicy:
        return ModelPolicy(
            priority=entry.priority,
            pinned=entry.pinned,
            idle_ttl_s=entry.ttl_s,
            device=entry.device,
            ranks=entry.ranks,
        )

    def _exceed_grant(self) -> None:
        """Measure for a minute that a worker uses more than its grant."""
        self.changes += 1
        alive = [it for it in self.entries.values() if it.worker is not None]
        if not alive:
            return
        name = self.draw.choice(alive).model.name
        held = self.governors.granted_to(name)
        self._apply(governor_events.MemoryMeasured({name: held + self.draw.randint(0, 400)}))
        self.later(60, lambda: self._apply(governor_events.MemoryMeasured({name: 0})))

    def _raise_pressure(self) -> None:
        self.changes += 1
        self._apply(governor_events.MemoryMeasured({}, self.draw.choice(["warning", "critical"])))
        self.later(60, lambda: self._apply(governor_events.MemoryMeasured({})))

    def _resize(self) -> None:
        self.changes += 1
        self.resized = True
        self._apply(governor_events.BudgetChanged(self.draw.randint(4200, 7000)))
        self.later(HOUR, lambda: self._apply(governor_events.BudgetChanged(BUDGET)))

    def _load_by_hand(self) -> None:
        entry = self.draw.choice(list(self.entries.values()))
        if entry.state == "unloaded":
            self._start_load(entry, patient=False)

    def _unload(self) -> None:
        """A user unloads a model, which finishes its requests first."""
        ready = [it for it in self.entries.values() if it.state == "ready"]
        if ready:
            self.changes += 1
            entry = self.draw.choice(ready)
            entry.state = "draining"
            self.counts["unloaded"] += 1
            self._apply(governor_events.UnloadStarted(entry.model.name))
            self._end_if_drained(entry)

    # The daemon: registry and router.

    def _start_load(self, entry: ModelEntry, *, patient: bool) -> None:
        entry.state = "loading"
        entry.life += 1
        life = entry.life
        self._apply(governor_events.LoadRequested(entry.model.name, self._policy(entry), patient))
        self.later(1.0, lambda: self._process_started(entry, life))

    def _process_started(self, entry: ModelEntry, life: int) -> None:
        if entry.life == life and entry.state == "loading":
            worker = entry.worker = SimWorker(
                entry.model, lambda kind, report: self._send(entry, life, kind, report)
            )
            worker.request(entry.model.base)

    def _answer(self, entry: ModelEntry, life: int, it: GrantDecision, budget: int) -> None:
        worker = entry.worker
        if worker is None or entry.life != life:
            return
        worker.answered(it.seq, it.total_bytes, budget, granted=it.granted)
        if entry.state != "loading":
            self._advance(entry)
        elif not it.granted:
            self.counts["load refused"] += 1
            self._exited(entry, crashed=False, refused=True)
        elif it.total_bytes == entry.model.base:
            self.later(entry.model.load_s, lambda: self._weights_loaded(entry, life))
        else:
            self._ready(entry)

    def _weights_loaded(self, entry: ModelEntry, life: int) -> None:
        if entry.life == life and entry.state == "loading" and entry.worker is not None:
            entry.worker.request(entry.model.base + entry.model.first)

    def _ready(self, entry: ModelEntry) -> None:
        self.counts["loaded"] += 1
        entry.state = "ready"
        self._apply(governor_events.ModelReady(entry.model.name))
        self._forward(entry)
        self._schedule_report(entry)

    def _forward(self, entry: ModelEntry) -> None:
        if entry.state == "ready" and not entry.held and entry.queue:
            assert entry.worker is not None
            for request in entry.queue:
                entry.worker.submit(request)
            entry.queue.clear()
            self._advance(entry)

    def _evict(self, entry: ModelEntry, *, requeue: bool) -> None:
        """Drain an idle model, which may have received a request in the meantime."""
        if requeue:
            assert entry.state in {"ready", "draining"}
            self.counts["requeued"] += 1
            self._exited(entry, crashed=False, requeue=True)
            return
        if entry.state == "loading":
            self.counts["stuck"] += 1
            self._exited(entry, crashed=False)
            return
        entry.state = "draining"
        self.counts["evicted"] += 1
        self._end_if_drained(entry)

    def _end_if_drained(self, entry: ModelEntry) -> None:
        if entry.state == "draining" and entry.worker is not None and entry.worker.idle:
            life = entry.life
            self.later(0.5, lambda: entry.life == life and self._exited(entry, crashed=False))

    def _exited(
        self, entry: ModelEntry, *, crashed: bool, refused: bool = False, requeue: bool = False
    ) -> None:
        """Handle the exit of a worker's process; replay its requests, unless they were refused."""
        worker = entry.worker
        entry.life += 1
        entry.worker, entry.serving = None, False
        if worker is not None:
            assert crashed or worker.idle or requeue, "requests in flight were aborted"
            assert not (requeue and worker.running), "a running row had to start again"
            lost = [*worker.running, *worker.queue]
            for row in lost:
                row.restart()
            entry.queue = [*sorted(lost, key=lambda it: it.number), *entry.queue]
        entry.state = "unloaded"
        self._apply(WorkerExited(entry.model.name))
        if refused:
            for request in entry.queue:
                self._refused(request)
            entry.queue.clear()
        if entry.queue or crashed:
            self._start_load(entry, patient=True)

    def _refused(self, request: SimRequest) -> None:
        model = request.model
        least = model.base + model.first
        ranks, host = self.entries[model.name].ranks, self.governors.host
        has_no_room = host is not None and ranks * HOST_BYTES > host.limit_of(model.name)
        assert has_no_room or least > self.governors.limit_of(model.name), (
            "refused although it could be granted"
        )
        request.ended = "refused"

    # Between daemon and worker.

    def _send(self, entry: ModelEntry, life: int, kind: str, report: dict[str, object]) -> None:
        """Deliver a worker's report later, with the bytes that are reclaimable now."""
        worker = entry.worker
        reclaimable = (
            worker.reclaimable() if worker is not None and entry.state != "loading" else None
        )
        self.later(LATENCY_S, lambda: self._received(entry, life, kind, report, reclaimable))

    def _received(
        self, entry: ModelEntry, life: int, kind: str, report: dict, reclaimable: object
    ) -> None:
        if entry.life != life:
            return
        name = entry.model.name
        if reclaimable is not None:
            self._apply(governor_events.ReclaimableReported(name, reclaimable))
        if kind == "requested":
            self._apply(MemoryRequest(name, report["seq"], report["total"], report["resuming"]))
        elif kind == "reclaimed":
            self._apply(
                governor_events.ReclaimFinished(
                    name, report["seq"], report["freed"], report["exhausted"]
                )
            )

    def _schedule_report(self, entry: ModelEntry) -> None:
        """Report reclaimable bytes, at most four times a second."""
        if not entry.reporting:
            entry.reporting = True
            self.later(0.25, lambda: self._report(entry))

    def _report(self, entry: ModelEntry) -> None:
        entry.reporting = False
        if entry.worker is not None and entry.state != "loading":
            self._send(entry, entry.life, "stats", {})

    def _apply(self, event: governor_events.Event) -> None:
        """Apply an event to the governor, and perform its commands."""
        self.steps += 1
        commands = self.governors.handle(event, self.now)
        self._check(commands)
        for command in commands:
            self._perform(command)
        self._set_alarm()

    def _set_alarm(self) -> None:
        due = self.governors.deadline
        if due is not None and (self._alarm_at is None or due < self._alarm_at):
            self._alarm_at = due
            self.at(due, self._alarm_fired)

    def _alarm_fired(self) -> None:
        if self._alarm_at is not None and self.now >= self._alarm_at:
            self._alarm_at = None
            due = self.governors.deadline
            if due is not None and due <= self.now:
                self._apply(governor_events.AlarmFired())
            else:
                self._set_alarm()

    def _perform(self, command: governor_events.Command) -> None:
        match command:
            case GrantDecision():
                entry, budget = self.entries[command.model], self.governors.limit_of(command.model)
                life = entry.life
                self.later(LATENCY_S, lambda: self._answer(entry, life, command, budget))
            case governor_events.Reclaim():
                self.counts[f"reclaim {command.method}"] += 1
                entry = self.entries[command.model]
                life = entry.life
                self.later(LATENCY_S, lambda: self._reclaim(entry, life, command))
            case governor_events.StartLevel():
                self.counts["start level"] += 1
                entry = self.entries[command.model]
                if entry.worker is not None:
                    entry.worker.level = command.level
            case governor_events.Evict():
                self._evict(self.entries[command.model], requeue=command.requeue)
            case governor_events.HoldRequests():
                self.counts["held"] += command.held
                entry = self.entries[command.model]
                entry.held = command.held
                self.later(0.0, lambda: self._forward(entry))
            case governor_events.RecordEvent():
                self.counts[f"event {command.kind}"] += 1

    def _reclaim(self, entry: ModelEntry, life: int, command: governor_events.Reclaim) -> None:
        if entry.worker is None or entry.life != life:
            return
        self._update_positions(entry.worker)
        preempted = entry.worker.reclaim(command)
        self.counts["preempted"] += len(preempted)
        for request in preempted:
            self._note_preempted(request)
        self._advance(entry)

    # The worker.

    def _advance(self, entry: ModelEntry) -> None:
        worker = entry.worker
        if worker is None:
            return
        while (head := worker.hopeless()) is not None:
            least = head.model.base + head.worst_case(2)
            assert least > self.governors.limit_of(head.model.name) or self.counts["event budget"]
            worker.drop(head)
            head.ended = "refused"
            self.counts["refused"] += 1
        self._update_positions(worker)
        started = worker.admit()
        for request in worker.make_room():
            self.counts["preempted for growth"] += 1
            request.made_room += 1
            self._note_preempted(request)
            self.later(0.0, lambda: self._advance(entry))
        for request in started:
            if request in worker.running:
                self._start_row(entry, request)
        for request in worker.running:
            if request not in started:
                self._continue_row(entry, request)
        self._update_serving(entry)
        self._schedule_report(entry)
        self._end_if_drained(entry)

    def _update_serving(self, entry: ModelEntry) -> None:
        busy = entry.worker is not None and not entry.worker.idle
        if busy != entry.serving:
            entry.serving = busy
            self._apply(governor_events.ServingChanged(entry.model.name, busy))

    def _update_positions(self, worker: SimWorker) -> None:
        for row in worker.running:
            done = self._generated_since_start(row)
            row.position = min(row.generated + done, row.reserved_tokens)
            if row.continued:
                row.since_preempted = done

    def _start_row(self, entry: ModelEntry, request: SimRequest) -> None:
        request.started = self.now
        request.planned_until = 0
        self._continue_row(entry, request)

    def _continue_row(self, entry: ModelEntry, request: SimRequest) -> None:
        """Schedule what the row does next within its reservation, after it began or grew."""
        if request.planned_until == request.reserved_tokens:
            return
        if request.stalled_at is not None:
            assert request.started is not None
            request.started += self.now - request.stalled_at
            request.stalled_at = None
        request.planned_until = end = request.reserved_tokens
        if end == request.length:
            self._at_token(entry, request, end, self._finish)
        else:
            self.counts["grew"] += 1
            self._at_token(entry, request, end - AHEAD // 2, self._row_is_due)
            self._at_token(entry, request, end, self._row_is_due)

    def _at_token(
        self,
        entry: ModelEntry,
        request: SimRequest,
        token: int,
        act: Callable[[ModelEntry, SimRequest], None],
    ) -> None:
        """Act when a row has so many tokens, unless its process ends or it is preempted first."""
        life, preemptions, planned = entry.life, request.preemptions, request.planned_until
        started = request.started or self.now
        decode_s = (token - request.generated) / request.model.tokens_per_s
        when = started + request.prompt / 2000 + decode_s

        def due() -> None:
            same = (entry.life, request.preemptions, request.planned_until)
            if same == (life, preemptions, planned) and entry.worker is not None:
                act(entry, request)

        self.at(max(self.now, when), due)

    def _row_is_due(self, entry: ModelEntry, request: SimRequest) -> None:
        """Extend a row's reservation; the row stalls if that is used up."""
        assert entry.worker is not None
        self._update_positions(entry.worker)
        if self._at_end(request) and request.stalled_at is None:
            request.position = request.reserved_tokens
            request.stalled_at = self.now
        self._advance(entry)

    def _at_end(self, request: SimRequest) -> bool:
        done = (self.now - (request.started or 0) - request.prompt / 2000) + 1e-6
        return request.generated + done * request.model.tokens_per_s >= request.reserved_tokens

    def _note_preempted(self, request: SimRequest) -> None:
        """Count the tokens that a row generated before it was preempted."""
        most = min(request.length - 1, request.reserved_tokens)
        done = request.generated + self._generated_since_start(request)
        request.generated = request.position = max(request.generated, min(most, done))
        request.reserved_tokens = 0

    def _generated_since_start(self, request: SimRequest) -> int:
        """Return the tokens of a running row since it started, or was resumed last."""
        now = self.now if request.stalled_at is None else request.stalled_at
        ran_s = now - (request.started or now) - request.prompt / 2000
        return max(0, int(ran_s * request.model.tokens_per_s + 1e-6))

    def _finish(self, entry: ModelEntry, request: SimRequest) -> None:
        assert entry.worker is not None
        request.generated, request.ended = request.length, "finished"
        self.longest = max(self.longest, self.now - request.arrived)
        self.counts["finished"] += 1
        entry.worker.finish(request)
        self._advance(entry)

    # Promises.

    def _check(self, commands: list[governor_events.Command]) -> None:
        self.governors.check()
        for device, governor in enumerate(self.governors.devices):
            ledger, ceiling = governor.ledger, self.ceilings[device]
            most = max(ledger.budget_bytes, ledger.ceiling_bytes)
            assert ledger.granted_bytes <= most, "grants above the budget"
            assert ceiling is None or ledger.granted_bytes <= ceiling, (
                "grants grew above the budget"
            )
            over = ledger.granted_bytes > ledger.budget_bytes
            assert not over or self.resized, "the budget was exceeded"
            self.ceilings[device] = ledger.granted_bytes if over else None
            self.most_granted = max(self.most_granted, ledger.granted_bytes / ledger.budget_bytes)
        for name, entry in self.entries.items():
            if entry.worker is not None and entry.state != "loading":
                assert entry.worker.held <= entry.worker.grant, "more held than granted"
                assert entry.worker.grant <= self.governors.granted_to(name), (
                    "the worker's grant is above the ledger's"
                )
        for command in commands:
            match command:
                case governor_events.RecordEvent(kind=kind):
                    self._check_devices(command)
                    if kind.startswith("reclaim_"):
                        self._check_order(command)

    def _check_devices(self, event: governor_events.RecordEvent) -> None:
        """Check that only models on the device that is short give memory back."""
        if event.reason.startswith("host memory: "):
            self.counts[f"event {event.kind} for the host"] += 1
            return
        device = event.numbers.get("device", 0)
        for name in (event.model, event.requester):
            if name:
                entry = self.entries[name]
                places = range(entry.device, entry.device + entry.ranks)
                assert device in places, f"{event.kind} of {name} for device {device}"

    def _check_order(self, event: governor_events.RecordEvent) -> None:
        """Check that no cheaper method could have freed memory of a model without open reclaim."""
        method = event.kind.removeprefix("reclaim_")
        governor = self.governors.devices[event.numbers.get("device", 0)]
        least = governor.view(self.now).min_bytes
        missing = event.numbers["missing_bytes"]
        found = [account.reclaimable for account in governor.accounts.values()]
        evicts_any = missing > sum(
            it.spare + it.prefixes + sum(it.levels) + it.preempt for it in found
        )
        for account in governor.accounts.values():
            if account.state != "ready" or account.open is not None:
                continue
            barren, reclaimable = account.barren, account.reclaimable
            free = reclaimable.spare + reclaimable.prefixes
            evicts = evicts_any or (account.is_evictable(self.now) and missing > free)
            # An eviction that the plan needs anyway frees these bytes too.
            others = account.name != event.requester and not evicts
            if method != "spare" and others and "spare" not in barren:
                assert reclaimable.spare < least, f"{method} before spare memory"
            if method not in {"spare", "prefixes"} and others and "prefixes" not in barren:
                assert reclaimable.prefixes < least, f"{method} before prefixes"
            if method == "preempt" and "precision" not in barren and not account.is_idle:
                assert max(reclaimable.levels, default=0) < least, "preempted before stepped down"
            if method == "preempt" and account.name != event.requester:
                assert not account.is_evictable(self.now), "preempted before evicted"

    def _check_the_end(self) -> None:
        for request in self.requests:
            assert request.ended, f"{request.number} never ended"
        assert self.longest < LONGEST_S, f"a request took {self.longest:.0f} s"
        for request in self.requests:
            reclaimed = request.preemptions - request.made_room
            assert reclaimed <= 1 + request.length // MIN_TOKENS, "preempted too often"
        causes = len(self.requests) + self.changes + self.counts["crashed"]
        actions = sum(self.counts[it] for it in self.counts if it.startswith("reclaim "))
        actions += self.counts["evicted"] + self.counts["held"] + self.counts["stuck"]
        actions += self.counts["requeued"]
        self.counts["actions"] = actions
        assert actions <= MAX_COMMANDS * causes, f"{actions} actions for {causes} causes"
        self.counts["events"] = self.steps


def summary(first: int, last: int) -> dict[str, Any]:
    """Run the seeds and return their counts."""
    total: Counter[str] = Counter()
    started, steps, longest = time.perf_counter(), [], 0.0
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
        "seconds": round(time.perf_counter() - started, 1),
        "counts": dict(sorted(total.items())),
    }


MERGED = {"least_events": min, "most_events": max, "longest_request_s": max}


def merge(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the counts of several runs."""
    merged = dict(pieces[0])
    for piece in pieces[1:]:
        counts = Counter(merged["counts"]) + Counter(piece["counts"])
        for key, value in piece.items():
            if key in MERGED:
                merged[key] = MERGED[key](merged[key], value)
            elif key not in {"command", "counts"}:
                merged[key] = merged[key] + value
        merged["counts"] = dict(sorted(counts.items()))
    merged["seconds"] = round(merged["seconds"], 1)
    merged["events_per_seed"] = round(merged["events"] / merged["seeds"])
    return merged


def main(arguments: list[str]) -> None:
    """Run a range of seeds, or merge the result files that are named."""
    if arguments[0].isdecimal():
        found = summary(int(arguments[0]), int(arguments[-1]))
    else:
        found = merge([json.loads(Path(name).read_text()) for name in arguments])
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
