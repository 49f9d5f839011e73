"""The router's shell: brings requests to workers and what becomes of them to clients.

Holds what the machine (`actors.machines.admission`) does not know: prompts, clients, seeds, and
what was sent (`actors.request_state`): a request whose worker dies goes on in the next one from there. With
records (`actors.saved_requests`) it also goes on after the daemon's own death, when its client attaches.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from sys import getsizeof
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from actors import mail, telemetry
from actors.machines import admission, admission_events, lifecycle_events
from actors.ports import Notice, ignore_observation
from actors.request_state import Job
from actors.runtime.actor import Actor, DeferredReply
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from actors.saved_requests import SavedRequests
from actors.timing import Timing
from protocol import messages
from protocol import worker as wire
from protocol.errors import KvdError, UnknownRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.event_log import EventLog
    from actors.mail import RouterMail, WorkerMail
    from actors.ports import Level, Notify, Observe
    from actors.runtime.actor import Ref
    from actors.status import StatusTable
    from actors.telemetry import Observation
    from protocol.messages import Event, Generate

TOKEN_BYTES = 36
"""Of a token id in a list: the integer and the pointer to it."""


@dataclass
class RouterState:
    """What outlives a restart of the router."""

    machine: admission.Admission
    draw_seed: Callable[[], int]
    board: StatusTable
    notify: Notify
    archive: SavedRequests = field(default_factory=SavedRequests)
    events: EventLog | None = None
    observe: Observe = ignore_observation
    summon: Callable[[str], None] = lambda _model: None
    """Tell the supervisor of a model that a request names and that is not here."""
    jobs: dict[str, Job] = field(default_factory=dict)
    workers: dict[str, Ref[WorkerMail]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.journal: EventHistory[admission_events.Event, admission_events.Command] = EventHistory(
            self.machine
        )
        self.board.requests = self.machine.counts
        self.board.paused = self.paused

    def paused(self) -> Counter[str]:
        """Count the requests that rest, by model."""
        requests = self.machine.requests
        return Counter(requests[rid].model for rid, job in self.jobs.items() if job.resting)

    def check(self) -> None:
        """Check the invariants."""
        self.machine.check()
        assert self.jobs.keys() == self.machine.requests.keys(), "requests without a client"


class Router(Actor["RouterMail"]):
    """Knows where each request is."""

    mailbox_limit = 65_536  # the reports of all workers pass here

    def __init__(self, office: RouterState) -> None:
        office.check()
        self._office = office
        self._finishing: list[DeferredReply[None]] = []
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        """Go on with the deadlines of the router before."""
        self._office.archive.begin(_now())
        self._set_alarm()

    def on_stop(self) -> None:
        """Set no alarm that outlives this router."""
        self._alarm.cancel()

    def check(self) -> None:
        """Check the invariants."""
        self._office.check()

    def receive(self, message: RouterMail) -> DeferredReply[None] | None:  # noqa: C901, PLR0912 - one match
        """Handle a message."""
        match message:
            case mail.Wanted():
                self._take(message)
            case mail.AttachWanted():
                self._attach(message)
            case mail.Unwanted(rid=rid):
                self._do(admission_events.RequestCancelled(rid))
            case mail.ModelAdded(model=model, worker=worker):
                self._office.workers[model] = worker
                self._do(admission_events.ModelChanged(model, "waiting"))
            case mail.ModelChanged(model=model, availability=availability, error=error):
                if model in self._office.workers:
                    self._do(admission_events.ModelChanged(model, availability, error))
            case mail.ModelForgotten(model=model, error=error):
                self._do(admission_events.ModelRemoved(model, error))
                self._office.workers.pop(model, None)
            case mail.ModelRests(model=model):
                self._do(admission_events.ModelEvicting(model))
            case mail.ModelAsleep(model=model):
                self._do(admission_events.ModelEvicted(model))
                self._office.workers.pop(model, None)
            case mail.ModelHeld(model=model, held=held):
                self._do(admission_events.ModelHeld(model, held))
            case mail.RowReported(report=report):
                self._report(report)
            case mail.RowBounced(rid=rid):
                self._do(admission_events.RequestReturned(rid))
            case mail.RowsDied():
                self._record_death(message)
                lost = admission_events.RequestsLost(
                    message.model,
                    message.rids,
                    message.error,
                    message.attributable,
                    message.again,
                )
                self._do(lost)
            case mail.AlarmFired():
                self._expire()
                self._do(admission_events.AlarmFired())
            case mail.FinishAll():
                later: DeferredReply[None] = DeferredReply()
                self._finishing.append(later)
                self._do(admission_events.DrainStarted())
                return later
            case _:
                assert_never(message)
        return None

    def _record_death(self, died: mail.RowsDied) -> None:
        events = self._office.events
        if died.again and events is not None:
            level: Level = "warning" if died.attributable else "info"
            numbers = {"requests": len(died.rids)}
            events.record("replay", died.model, died.error.message, level=level, numbers=numbers)

    def _take(self, wanted: mail.Wanted) -> None:
        request = wanted.request
        given = request.sampling.seed
        seed = given if given is not None else self._office.draw_seed()
        submit = _submit(wanted.rid, request, seed)
        deadline = None if request.deadline_s is None else _now() + request.deadline_s
        office, rid = self._office, wanted.rid
        name = office.archive.name(rid) if wanted.kept else ""
        timing = Timing(request.model, _now())
        office.jobs[rid] = Job(
            request.id, wanted.client, submit, timing, deadline, name, wanted.kept
        )
        office.observe(telemetry.RequestArrived(request.model))
        self._do(admission_events.RequestArrived(rid, request.model, _size(submit), deadline))
        if wanted.kept and rid in office.jobs:  # not refused; no worker has said anything yet
            office.archive.asked(rid, request.model, submit)

    def _attach(self, wanted: mail.AttachWanted) -> None:
        """Tell a client what it lacks of a saved request, and let that run again."""
        request, office = wanted.request, self._office
        rid = request.request
        try:
            if rid in office.jobs:
                raise UnknownRequest(f"request {rid!r} belongs to a client already", request=rid)
            saved = office.archive.find(rid)
            rest = saved.rest(request)
        except KvdError as error:
            wanted.client.tell(mail.Deliver(messages.Error(id=request.id, error=error.info())))
            return
        for event in rest:
            wanted.client.tell(mail.Deliver(event))
        if saved.end is not None:
            office.archive.forget(rid)
            return
        deadline = office.archive.deadline_of(saved)
        office.jobs[rid] = saved.job(request, wanted.client, deadline)
        office.observe(telemetry.RequestArrived(saved.model))
        self._do(admission_events.RequestArrived(rid, saved.model, _size(saved.submit), deadline))

    def _expire(self) -> None:
        office = self._office
        for rid in office.archive.expire(_now(), set(office.jobs)):
            office.notify(Notice("request_expired", "warning", {"rid": rid}))

    def _report(self, report: wire.Report) -> None:
        """Pass a worker's word on; one about a request that is over already is late, no fault."""
        rid = getattr(report, "rid", "")
        job = self._office.jobs.get(rid)
        if job is None:
            return
        if job.kept:
            self._office.archive.heard(rid, report)
        if (event := job.hear(report)) is not None:
            self._tell(job, event)
        if isinstance(report, wire.RowTokens):
            if job.fresh:
                job.fresh = False
                self._do(admission_events.RequestProgressed(rid))
        elif isinstance(report, wire.RowAdmitted):
            self._observe(job.timing.begins(_now()))
        elif isinstance(report, wire.RowQueued):
            if not job.lined_up:
                job.lined_up = True
                self._do(admission_events.QueuedInWorker(rid))
        elif event is not None and messages.is_last(event):
            del self._office.jobs[rid]
            self._do(admission_events.RequestFinished(rid))

    def _do(self, event: admission_events.Event) -> None:
        for command in self._office.journal.handle(event, _now()):
            self._perform(command)
        self._set_alarm()

    def _set_alarm(self) -> None:
        office = self._office
        times = [office.machine.deadline, office.archive.deadline]
        self._alarm.set(min((at for at in times if at is not None), default=None))

    def _perform(self, command: admission_events.Command) -> None:  # noqa: C901, PLR0912 - one match
        office = self._office
        match command:
            case admission_events.Forward(rid=rid, model=model):
                job = office.jobs[rid]
                job.fresh, job.lined_up = True, False
                office.workers[model].tell(mail.RunRow(_timed(job)))
            case admission_events.EnsureLoaded(model=model):
                office.summon(model)
            case admission_events.ReportPaused(rid=rid):
                job = office.jobs[rid]
                if (event := job.lost()) is not None:
                    self._tell(job, event)
            case admission_events.ReportBlame(model=model, reason=reason):
                if office.events is not None:
                    office.events.record("quarantine", model, reason, level="error")
                office.workers[model].tell(mail.Order(lifecycle_events.RequestBlamed()))
            case admission_events.CancelInWorker(rid=rid, model=model):
                office.workers[model].tell(mail.CancelRow(rid))
            case admission_events.FailRequest(rid=rid, error=error):
                job = office.jobs.pop(rid)
                if job.kept and not (office.machine.draining or rid in office.archive.saved):
                    office.archive.forget(rid)  # else its client may come back for it
                self._tell(job, messages.Error(id=job.id, error=error))
            case admission_events.ConfirmCancel(rid=rid):
                job = office.jobs.pop(rid)
                if job.kept:
                    office.archive.forget(rid)
                for event in job.cancelled():
                    self._tell(job, event)
            case admission_events.Drained():
                finishing, self._finishing = self._finishing, []
                for later in finishing:
                    later.answer(None)
            case _:
                assert_never(command)

    def _observe(self, observation: Observation | None) -> None:
        if observation is not None:
            self._office.observe(observation)

    def _tell(self, job: Job, event: Event) -> None:
        self._observe(job.timing.told(event, _now()))
        if messages.is_last(event):
            ended = event.reason if isinstance(event, messages.Done) else "error"
            code = event.error.code if isinstance(event, messages.Error) else None
            fields = {"rid": job.submit.rid, "reason": ended, "code": code}
            self._office.notify(Notice("request_done", "debug", fields))
        job.client.tell(mail.Deliver(event))


_SHARED = sorted(set(wire.Submit.__struct_fields__) & set(messages.Generate.__struct_fields__))
"""What a worker gets as the client said it."""
_SHORTEST_S = 0.001
"""Of a deadline that passes on the way: the worker says so, as it does of all that it has."""


def _submit(rid: str, request: Generate, seed: int) -> wire.Submit:
    said = {name: getattr(request, name) for name in _SHARED}
    return wire.Submit(rid=rid, **said | {"sampling": replace(request.sampling, seed=seed)})


def _timed(job: Job) -> wire.Submit:
    """Return what the worker gets now: its clock starts with what is left of the deadline."""
    submit = job.again()
    if job.deadline is None:
        return submit
    return replace(submit, deadline_s=max(_SHORTEST_S, job.deadline - _now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _size(submit: wire.Submit) -> int:
    """Return about how many bytes of memory the client's part of a request takes."""
    texts = [*submit.stop, submit.prefix_salt or ""]
    if submit.prompt is not None:
        texts.append(submit.prompt)
    for turn in submit.messages or []:
        texts += (turn.role, turn.content)
    numbers = len(submit.tokens or []) + len(submit.stop_tokens)
    biases = 2 * len(submit.sampling.logit_bias)
    return sum(map(getsizeof, texts)) + TOKEN_BYTES * (numbers + biases)
