"""The router's actor: passes requests to workers, and their reports to clients.

Holds what the state machine (`actors.machines.admission`) does not know: prompts, clients, seeds
and what was sent. A request whose worker dies continues in the next process. With a journal it
also survives the daemon and continues when its client attaches.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import assert_never

from msgspec.structs import replace

from actors import mail, telemetry
from actors.cache_outcomes import CacheOutcomes
from actors.event_log import EventLog
from actors.machines import admission, admission_events, lifecycle_events
from actors.ports import Notice, Notify, Observe
from actors.request_log import RequestLog
from actors.request_state import RequestState
from actors.runtime.actor import Actor, DeferredReply, Ref
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from actors.saved_requests import SavedRequests
from actors.status import StatusTable
from actors.telemetry import Observation, Timing
from protocol import messages
from protocol import worker as wire
from protocol.cache_outcome import RowCached
from protocol.embedding import Embed, EmbedOptions
from protocol.errors import ErrorInfo, KvdError, UnknownRequest
from protocol.json_values import size_of
from protocol.messages import Event
from protocol.types import Sampling

TOKEN_BYTES = 36
"""Bytes of a token id in a list: the integer and the pointer to it."""
_MIN_DEADLINE_S = 0.001
"""Seconds sent for a deadline that has passed, so that the worker ends the request as usual."""
_SHARED_FIELDS = sorted(
    set(wire.Submit.__struct_fields__) & set(messages.Generate.__struct_fields__)
)
"""Fields of a client's request that the worker gets unchanged."""


@dataclass
class RouterState:
    """The router's state, which survives a restart of its actor."""

    machine: admission.Admission
    draw_seed: Callable[[], int]
    statuses: StatusTable
    notify: Notify
    saved: SavedRequests
    events: EventLog
    observe: Observe
    outcomes: CacheOutcomes
    request_load: Callable[[str], None] = lambda _model: None
    keep_loaded: Callable[[str, float], None] = lambda _model, _seconds: None
    requests: dict[str, RequestState] = field(default_factory=dict)
    log: RequestLog = field(default_factory=RequestLog)
    workers: dict[str, Ref[mail.WorkerMail]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.history: EventHistory[admission_events.Event, admission_events.Command] = EventHistory(
            self.machine
        )
        self.statuses.requests = self.machine.counts
        self.statuses.paused = self.count_paused

    def count_paused(self) -> Counter[str]:
        models = self.machine.requests
        return Counter(models[rid].model for rid, state in self.requests.items() if state.paused)

    def check(self) -> None:
        self.machine.check()
        assert self.requests.keys() == self.machine.requests.keys(), (
            "the machine has different requests"
        )


class Router(Actor[mail.RouterMail]):
    """Tracks every request from arrival to end."""

    mailbox_limit = 65_536  # the reports of all workers pass through here

    def __init__(self, state: RouterState) -> None:
        state.check()
        self._state = state
        self._finishing: list[DeferredReply[None]] = []
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._state.saved.begin(_now())
        self._set_alarm()

    def on_stop(self) -> None:
        self._alarm.cancel()

    def check(self) -> None:
        self._state.check()

    def receive(self, message: mail.RouterMail) -> DeferredReply[None] | None:
        match message:
            case mail.SubmitRequest():
                self._submit(message)
            case mail.AttachRequest():
                self._attach(message)
            case mail.ModelAdded(model=model, worker=worker):
                self._state.workers[model] = worker
                self._handle(admission_events.ModelChanged(model, "waiting"))
            case mail.AdmissionEvent(event=event):
                self._on_event(event)
            case mail.RowReported(report=report):
                self._on_report(report)
            case mail.AlarmFired():
                self._expire_saved()
                self._handle(admission_events.AlarmFired())
            case mail.FinishAll():
                reply: DeferredReply[None] = DeferredReply()
                self._finishing.append(reply)
                self._handle(admission_events.DrainStarted())
                return reply
            case _:
                assert_never(message)
        return None

    def _on_event(self, event: admission_events.Event) -> None:
        workers = self._state.workers
        if isinstance(event, admission_events.ModelChanged) and event.model not in workers:
            return
        if isinstance(event, admission_events.RequestsLost):
            self._record_death(event)
        self._handle(event)
        if isinstance(event, admission_events.ModelRemoved | admission_events.ModelEvicted):
            workers.pop(event.model, None)

    def _record_death(self, lost: admission_events.RequestsLost) -> None:
        if lost.again:
            self._state.events.record(
                "replay",
                lost.model,
                lost.error.message,
                level="warning" if lost.attributable else "info",
                numbers={"requests": len(lost.rids)},
            )

    # -- requests ---------------------------------------------------------------------------------

    def _submit(self, message: mail.SubmitRequest) -> None:
        state, rid, request = self._state, message.rid, message.request
        submit = _first_submit(rid, request, state.draw_seed)
        deadline = None if request.deadline_s is None else _now() + request.deadline_s
        state.requests[rid] = RequestState(
            request.id,
            message.client,
            submit,
            Timing(request.model, _now()),
            deadline,
            request.keep_alive_s,
        )
        state.observe(telemetry.RequestArrived(request.model))
        self._handle(admission_events.RequestArrived(rid, request.model, _size(submit), deadline))
        if message.journaled and (accepted := state.requests.get(rid)) is not None:
            accepted.attach_name = state.saved.record_request(rid, request.model, submit)

    def _attach(self, message: mail.AttachRequest) -> None:
        """Send a client the events that it lacks of a saved request, and continue the request."""
        request, state = message.request, self._state
        rid = request.request
        try:
            if rid in state.requests:
                raise UnknownRequest(
                    f"request {rid!r} already belongs to another connection", request=rid
                )
            saved = state.saved.find(rid)
            resumed = saved.to_state(request, message.client, state.saved.deadline_of(saved))
            events = saved.missing_events(request)
        except KvdError as error:
            message.client.tell(mail.Deliver(messages.Error(id=request.id, error=error.info())))
            return
        for event in events:
            message.client.tell(mail.Deliver(event, saved=True), beyond_limit=True)
        if saved.end is not None:
            return  # kept, because the connection may be cut before the client has read the end
        state.requests[rid] = resumed
        state.observe(telemetry.RequestArrived(saved.model))
        self._handle(
            admission_events.RequestArrived(rid, saved.model, _size(saved.submit), resumed.deadline)
        )

    def _expire_saved(self) -> None:
        state = self._state
        for rid in state.saved.expire(_now(), set(state.requests)):
            state.notify(Notice("request_expired", "warning", {"rid": rid}))

    def _on_report(self, report: wire.RowReport) -> None:
        """Pass a worker's report on; ignore a late report about a request that has ended."""
        rid = report.rid
        request = self._state.requests.get(rid)
        if request is None:
            return
        if (choice := request.unknown_choice(report)) is not None:
            choices = len(request.choices)
            self._replace_worker(rid, f"it reported choice {choice} of a request with {choices}")
            return
        event = self._pass_on(request, report)
        self._handle_progress(request, report)
        if event is not None and messages.is_last(event):
            del self._state.requests[rid]
            self._handle(admission_events.RequestFinished(rid))

    def _pass_on(self, request: RequestState, report: wire.RowReport) -> Event | None:
        """Record a report, and send the client's event; return that if there is one."""
        if request.attach_name:
            self._state.saved.record_report(request.submit.rid, report)
        if (event := request.apply_report(report)) is not None:
            self._send(request, event)
        return event

    def _handle_progress(self, request: RequestState, report: wire.RowReport) -> None:
        rid = request.submit.rid
        match report:
            case wire.RowTokens() if request.awaits_tokens:
                request.awaits_tokens = False
                self._handle(admission_events.RequestProgressed(rid))
            case wire.RowNote(reason=reason):
                model = self._state.machine.requests[rid].model
                self._state.events.record("malformed_call", model, f"request {rid}: {reason}")
            case RowCached(outcome=outcome):
                model = self._state.machine.requests[rid].model
                self._state.outcomes.record(rid, request.id, model, outcome)
            case wire.RowAdmitted():
                self._observe(request.timing.observe_admission(_now()))
            case wire.RowQueued() if not request.queued_in_worker:
                request.queued_in_worker = True
                self._handle(admission_events.QueuedInWorker(rid))
            case _:
                pass

    def _replace_worker(self, rid: str, reason: str) -> None:
        """Have the process replaced that runs the request, because it broke the protocol."""
        model = self._state.machine.requests[rid].model
        if (worker := self._state.workers.get(model)) is not None:
            worker.tell(mail.LifecycleEvent(lifecycle_events.Fault(reason)))

    def _send(self, request: RequestState, event: Event) -> None:
        self._observe(request.timing.observe_event(event, _now()))
        if messages.is_last(event):
            reason = event.reason if isinstance(event, messages.Done) else "error"
            code = event.error.code if isinstance(event, messages.Error) else None
            fields = {"rid": request.submit.rid, "reason": reason, "code": code}
            self._state.notify(Notice("request_done", "debug", fields))
            self._state.log.record_end(request, event, _now())
        request.client.tell(mail.Deliver(event))

    def _observe(self, observation: Observation | None) -> None:
        if observation is not None:
            self._state.observe(observation)

    # -- the state machine ------------------------------------------------------------------------

    def _handle(self, event: admission_events.Event) -> None:
        for command in self._state.history.handle(event, _now()):
            self._execute(command)
        self._set_alarm()

    def _set_alarm(self) -> None:
        state = self._state
        times = [state.machine.deadline, state.saved.deadline]
        self._alarm.set(min((at for at in times if at is not None), default=None))

    def _execute(self, command: admission_events.Command) -> None:  # noqa: C901 - one match
        state = self._state
        match command:
            case admission_events.Forward(rid=rid, model=model):
                self._forward(state.requests[rid], model)
            case admission_events.EnsureLoaded(model=model):
                state.request_load(model)
            case admission_events.ReportPaused(rid=rid):
                request = state.requests[rid]
                if (event := request.worker_died()) is not None:
                    self._send(request, event)
            case admission_events.ReportBlame(model=model, reason=reason):
                state.events.record("quarantine", model, reason, level="error")
                state.workers[model].tell(mail.LifecycleEvent(lifecycle_events.RequestBlamed()))
            case admission_events.CancelInWorker(rid=rid, model=model):
                state.workers[model].tell(mail.CancelRow(rid))
            case admission_events.FailRequest(rid=rid, error=error):
                self._fail(rid, error)
            case admission_events.ConfirmCancel(rid=rid):
                request = state.requests.pop(rid)
                for report in request.cancelled_reports():
                    self._pass_on(request, report)
            case admission_events.Drained():
                finishing, self._finishing = self._finishing, []
                for reply in finishing:
                    reply.answer(None)
            case _:
                assert_never(command)

    def _forward(self, request: RequestState, model: str) -> None:
        request.awaits_tokens, request.queued_in_worker = True, False
        if request.keep_alive_s is not None:
            self._state.keep_loaded(model, request.keep_alive_s)
        self._state.workers[model].tell(mail.RunRow(_to_submit_now(request)))

    def _fail(self, rid: str, error: ErrorInfo) -> None:
        state = self._state
        request = state.requests.pop(rid)
        if state.machine.draining or rid in state.saved.saved:
            request.attach_name = ""  # no end is recorded, so that the client may attach again
        self._pass_on(request, wire.RowFailed(rid=rid, error=error))


def _first_submit(
    rid: str, request: messages.Generate | Embed, draw_seed: Callable[[], int]
) -> wire.Submit:
    """Return the worker's command for a new request."""
    if isinstance(request, Embed):
        return wire.Submit(
            rid=rid,
            prompt=request.prompt,
            tokens=request.tokens,
            embed=EmbedOptions(request.dimensions),
            sampling=Sampling(seed=0),
            max_tokens=1,
            priority=request.priority,
            deadline_s=request.deadline_s,
        )
    seed = request.sampling.seed
    fields = {name: getattr(request, name) for name in _SHARED_FIELDS}
    fields["sampling"] = replace(request.sampling, seed=draw_seed() if seed is None else seed)
    return wire.Submit(rid=rid, **fields)


def _to_submit_now(request: RequestState) -> wire.Submit:
    """Return the worker's command with the seconds that are left until the deadline."""
    submit = request.to_submit()
    if request.deadline is None:
        return submit
    return replace(submit, deadline_s=max(_MIN_DEADLINE_S, request.deadline - _now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _size(submit: wire.Submit) -> int:
    """Return roughly how many bytes of memory the client's part of a request takes."""
    texts = [*submit.stop, submit.prefix_salt or ""]
    if submit.prompt is not None:
        texts.append(submit.prompt)
    for message in submit.messages or []:
        texts += (message.role, message.content, message.reasoning)
        texts += (call.arguments for call in message.tool_calls)
    grammars = [tool.grammar for tool in submit.chat.tools]
    texts += (grammar.value for grammar in [submit.grammar, *grammars] if grammar is not None)
    texts += (tool.description for tool in submit.chat.tools)
    values = [submit.chat.template, *(tool.parameters for tool in submit.chat.tools)]
    numbers = len(submit.tokens or []) + len(submit.stop_tokens)
    biases = 2 * len(submit.sampling.logit_bias)
    return sum(map(getsizeof, texts)) + sum(map(size_of, values)) + TOKEN_BYTES * (numbers + biases)
