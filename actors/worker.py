"""The actor of one model's worker: runs the process as the lifecycle state machine decides."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never, cast

from msgspec.structs import replace

from actors import mail, telemetry
from actors.machines import (
    admission_events,
    governor_events,
    lifecycle,
    lifecycle_events,
    prefix_store_events,
    process_exit,
    time_slices,
)
from actors.machines.ledger import WorkerExited
from actors.ports import Exit, Level, Notice, Notify, Observe, SpawnWorker, WorkerProcess
from actors.runtime.actor import Actor, DeferredReply, MailboxFull, Ref
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from actors.status import StatusTable
from protocol import worker as wire
from protocol.errors import ErrorInfo, WorkerDied
from protocol.types import ModelInfo, ModelState, ModelStatus, RankStatus, WorkerStats


@dataclass(frozen=True)
class WorkerServices:
    """The actors and ports that all workers share."""

    spawn: SpawnWorker
    router: Ref[mail.RouterMail]
    time_slices: Ref[mail.TimeSlicesMail]
    governor: Ref[mail.GovernorMail]
    registry: Ref[mail.RegistryMail]
    prefix_store: Ref[mail.PrefixStoreMail]
    statuses: StatusTable
    notify: Notify
    observe: Observe
    lives: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Process numbers, unique across models, so that a reloaded model gets a new one."""


@dataclass
class WorkerState:
    """A worker's state, which survives a restart of its actor."""

    name: str
    load: wire.LoadModel
    services: WorkerServices
    machine: lifecycle.Lifecycle
    weight: float = 1.0
    device: int = 0
    """Number of the GPU of the model, or of its first rank."""
    process: WorkerProcess | None = None
    life: int = 0
    """Number of the process."""
    started: set[int] = field(default_factory=set)
    """Process ids of the ranks that have reported their start."""
    early: list[mail.ProcessReported | mail.ProcessExited] = field(default_factory=list)
    """Messages that the process sent before `ProcessSpawned` arrived."""
    rows: dict[str, wire.Submit] = field(default_factory=dict)
    """Requests that were not sent to the process yet."""
    tokenizing: dict[int, DeferredReply[wire.Tokenized]] = field(default_factory=dict)
    """Replies that are due for `wire.Tokenize` commands, by ``seq``."""
    tokenize_seq: int = 0
    serving: bool = False
    """Whether the process has requests, as last reported to the governor."""
    granted_bytes: int = 0
    freed_bytes: int = 0
    """Bytes granted to the previous process until it exited."""
    info: ModelInfo | None = None
    stats: WorkerStats = field(default_factory=WorkerStats)

    def __post_init__(self) -> None:
        self.history: EventHistory[lifecycle_events.Event, lifecycle_events.Command] = EventHistory(
            self.machine, merged=lifecycle_events.FREQUENT
        )

    @property
    def ranks(self) -> list[RankStatus]:
        """The processes of a gang; empty for a worker of one process."""
        if self.process is None or self.load.ranks == 1:
            return []
        return [
            RankStatus(pid=pid, state="running" if pid in self.started else "starting")
            for pid in self.process.pids
        ]

    @property
    def model_state(self) -> ModelState:
        return cast("ModelState", type(self.machine.state).__name__.lower())


class Worker(Actor[mail.WorkerMail]):
    """Keeps one model's process running."""

    # One read of the socket may hold thousands of reports, and each causes messages to others.
    messages_per_pass = 64

    def __init__(self, state: WorkerState) -> None:
        state.machine.check()
        self._state = state
        self._services = state.services
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._publish()

    def on_restart(self, error: BaseException) -> None:
        """Replace the process whose report caused the failure."""
        self._handle_event(lifecycle_events.Fault(f"{type(error).__name__}: {error}"))

    def on_stop(self) -> None:
        """Kill the process, because nothing supervises it from here on."""
        self._alarm.cancel()
        if self._state.process is not None:
            self._state.process.kill()

    def check(self) -> None:
        self._state.machine.check()
        running = self._state.machine.pid is not None
        assert running == (self._state.process is not None), "machine and actor disagree"

    def receive(self, message: mail.WorkerMail) -> object:  # noqa: C901, PLR0912 - one match
        state = self._state
        match message:
            case mail.LifecycleEvent(event=event):
                self._handle_event(event)
            case mail.RunRow(submit=submit):
                state.rows[submit.rid] = submit
                self._handle_event(lifecycle_events.RequestAssigned(submit.rid))
            case mail.CancelRow(rid=rid):
                if rid in state.machine.requests:
                    self._send(wire.CancelRow(rid=rid))
            case mail.SendCommand(command=command, life=life):
                if life == state.life:
                    self._send(command)
            case mail.GrantPending(life=life):
                if life == state.life and state.process is not None:
                    self._handle_event(lifecycle_events.SignOfLife())
            case mail.SetWeight(weight=weight):
                state.weight = weight
                self._tell_time_slices(time_slices.WeightChanged(state.name, weight))
            case mail.Tokenize(command=command):
                return self._tokenize(command)
            case mail.ProcessSpawned(process=process):
                self._on_spawned(process)
            case mail.SpawnFailed(error=error):
                self._handle_event(lifecycle_events.SpawnFailed(str(error) or type(error).__name__))
            case mail.ProcessReported() | mail.ProcessExited():
                if message.life == state.life:
                    self._on_process_message(message)
            case mail.AlarmFired():
                self._handle_event(lifecycle_events.AlarmFired())
            case _:
                assert_never(message)
        return None

    def _tokenize(self, command: wire.Tokenize) -> DeferredReply[wire.Tokenized]:
        state = self._state
        if state.process is None or state.info is None:
            raise _tokenize_failed(state.name)
        reply: DeferredReply[wire.Tokenized] = DeferredReply()
        state.tokenize_seq += 1
        state.tokenizing[state.tokenize_seq] = reply
        self._send(replace(command, seq=state.tokenize_seq))
        return reply

    def _send(self, command: wire.Command) -> None:
        state = self._state
        if state.process is None:
            return
        state.process.send(command)
        if isinstance(command, wire.Grant):
            state.granted_bytes = command.total_bytes
            self._publish()

    def _tell_governor(self, event: governor_events.Event) -> None:
        self._services.governor.tell(mail.GovernorEvent(event))

    def _tell_time_slices(
        self, event: time_slices.WeightChanged | time_slices.WorkerExited
    ) -> None:
        self._services.time_slices.tell(mail.TimeSlicesEvent(event))

    # -- the process ------------------------------------------------------------------------------

    def _spawn(self) -> None:
        state, ref = self._state, self.ref
        state.life = next(self._services.lives)
        state.early.clear()
        state.started.clear()
        state.info, state.stats = None, WorkerStats()
        life = state.life

        def on_report(report: wire.Report) -> None:
            try:
                ref.tell(mail.ProcessReported(report, life))
            except MailboxFull:  # one read of the socket holds fewer: the process floods the daemon
                if state.process is not None:
                    state.process.kill()

        def on_exit(end: Exit) -> None:
            ref.tell(mail.ProcessExited(end, life), beyond_limit=True)

        def done(process: WorkerProcess) -> None:
            if ref.alive:
                ref.tell(mail.ProcessSpawned(process), beyond_limit=True)
            else:
                process.kill()

        self.pipe(
            self._services.spawn(
                state.name,
                ranks=state.load.ranks,
                device=state.device,
                on_report=on_report,
                on_exit=on_exit,
            ),
            done,
            lambda error: ref.tell(mail.SpawnFailed(error), beyond_limit=True),
        )

    def _on_spawned(self, process: WorkerProcess) -> None:
        self._state.process = process
        self._handle_event(lifecycle_events.Spawned(process.pid))
        self._publish()
        early, self._state.early = self._state.early, []
        for message in early:
            self._on_process_message(message)

    def _on_process_message(self, message: mail.ProcessReported | mail.ProcessExited) -> None:
        if self._state.process is None:
            self._state.early.append(message)
        elif isinstance(message, mail.ProcessReported):
            self._on_report(message.report)
        else:
            self._on_exit(message.exit)

    def _on_exit(self, end: Exit) -> None:
        state = self._state
        process, state.process = state.process, None
        assert process is not None, "a worker that exits twice"
        pid = process.pids[end.rank or 0]
        state.stats = WorkerStats()
        for reply in state.tokenizing.values():
            reply.fail(_tokenize_failed(state.name))
        state.tokenizing.clear()
        self._notify("worker_exit", pid=pid, returncode=end.returncode, rank=end.rank)
        self._services.prefix_store.tell(
            mail.PrefixStoreEvent(prefix_store_events.WorkerExited(state.life)), beyond_limit=True
        )
        self._handle_event(lifecycle_events.Exited(end.returncode, end.starved, end.rank))

    def _on_report(self, report: wire.Report) -> None:  # noqa: C901, PLR0912 - one match
        state, services = self._state, self._services
        if isinstance(report, wire.RowReport):
            self._on_row_report(report)
            return
        if isinstance(report, wire.SegmentReport):
            self._handle_event(lifecycle_events.SignOfLife())
            draining = not isinstance(state.machine.state, lifecycle_events.Ready)
            services.prefix_store.tell(
                mail.SegmentsReported(self.ref, state.name, state.life, report, draining)
            )
            return
        match report:
            case wire.Started():
                self._on_started(report)
            case wire.Progress(stage=stage, fraction=fraction):
                self._handle_event(lifecycle_events.SignOfLife())
                services.registry.tell(mail.LoadProgressed(state.name, stage, fraction))
            case wire.Ready(info=info):
                state.info = info
                self._tell_governor(governor_events.ModelReady(state.name))
                self._handle_event(lifecycle_events.Loaded())
            case wire.LoadFailed(error=error):
                self._handle_event(lifecycle_events.LoadFailed(error))
            case wire.MemoryRequested():
                self._handle_event(lifecycle_events.SignOfLife())
                reclaimable = report.reclaimable if state.info is not None else None
                request = mail.RequestMemory(
                    state.name,
                    self.ref,
                    state.life,
                    report.seq,
                    report.total_bytes,
                    reclaimable,
                    report.resuming,
                )
                services.governor.tell(request)
            case wire.PhaseChanged(phase=phase):
                self._handle_event(lifecycle_events.PhaseEntered(phase))
            case wire.Tokenized(seq=seq):
                self._handle_event(lifecycle_events.SignOfLife())
                if (reply := state.tokenizing.pop(seq, None)) is not None:
                    reply.answer(report)
            case wire.Stats(stats=stats):
                self._on_stats(stats)
            case wire.TimeSliceRequested(step_s=step_s):
                self._request_time_slice(step_s)
            case wire.TimeSliceOver():
                self._handle_event(lifecycle_events.SignOfLife())
                services.time_slices.tell(mail.TimeSliceEnded(state.name, report))
            case wire.Reclaimed(seq=seq, freed_bytes=freed, exhausted=exhausted):
                self._handle_event(lifecycle_events.SignOfLife())
                self._tell_governor(
                    governor_events.ReclaimFinished(state.name, seq, freed, exhausted)
                )
            case _:
                assert_never(report)

    def _request_time_slice(self, step_s: float | None) -> None:
        it = self._state
        self._services.time_slices.tell(
            mail.RequestTimeSlice(it.name, self.ref, it.life, it.weight, step_s, it.device)
        )

    def _on_started(self, report: wire.Started) -> None:
        """Start the load once all ranks run, so that the deadline of the start covers each."""
        state = self._state
        self._notify("worker_started", pid=report.pid, mlx=report.mlx or None)
        state.started.add(report.pid)
        if len(state.started) == state.load.ranks:
            self._handle_event(lifecycle_events.Started())
        else:
            self._publish()

    def _on_row_report(self, report: wire.RowReport) -> None:
        """Pass on a report about a request of this process; ignore those about any other."""
        if report.rid not in self._state.machine.requests:
            self._handle_event(lifecycle_events.SignOfLife())
            return
        if isinstance(report, wire.RowFinished | wire.RowFailed):
            self._services.router.tell(mail.RowReported(report))
            self._handle_event(lifecycle_events.RequestFinished(report.rid))
            return
        produced = isinstance(report, wire.RowTokens | wire.ChoiceFinished)
        self._handle_event(
            lifecycle_events.TokenGenerated() if produced else lifecycle_events.SignOfLife()
        )
        self._services.router.tell(mail.RowReported(report))

    def _on_stats(self, stats: WorkerStats) -> None:
        state = self._state
        if stats.reclaimable != state.stats.reclaimable:
            self._tell_governor(governor_events.ReclaimableReported(state.name, stats.reclaimable))
        state.stats = stats
        self._services.observe(telemetry.StatsReported(state.name, state.life, stats))
        self._handle_event(lifecycle_events.SignOfLife())
        self._publish()

    # -- the state machine ------------------------------------------------------------------------

    def _handle_event(self, event: lifecycle_events.Event) -> None:
        state, machine = self._state, self._state.machine
        before = (state.model_state, _standing(machine.state))
        now = asyncio.get_running_loop().time()
        for command in state.history.handle(event, now):
            self._execute(command)
        self._alarm.set(machine.deadline)
        if bool(machine.requests) != state.serving:
            state.serving = not state.serving
            self._tell_governor(governor_events.ServingChanged(state.name, state.serving))
        if (state.model_state, _standing(machine.state)) != before:
            self._announce(before[0])

    def _execute(self, command: lifecycle_events.Command) -> None:  # noqa: C901 - one match
        state = self._state
        match command:
            case lifecycle_events.Spawn():
                self._spawn()
            case lifecycle_events.SendLoad():
                self._send(state.load)
            case lifecycle_events.SendRequest(rid=rid):
                self._send(state.rows.pop(rid))
            case lifecycle_events.ReturnRequest(rid=rid):
                del state.rows[rid]
                self._tell_router(admission_events.RequestReturned(rid))
            case lifecycle_events.SendStop(write_s=write_s):
                self._send(wire.Stop(write_s=write_s))
            case lifecycle_events.Terminate():
                self._notify("worker_terminated", level="warning")
                if state.process is not None:
                    state.process.terminate()
            case lifecycle_events.Kill():
                self._notify("worker_killed", level="warning")
                if state.process is not None:
                    state.process.kill()
            case lifecycle_events.LoseRequests(rids=rids, error=error):
                self._tell_router(
                    admission_events.RequestsLost(
                        state.name, rids, error, command.attributable, command.again
                    )
                )
            case lifecycle_events.ReleaseMemory():
                self._tell_governor(WorkerExited(state.name))
                self._tell_time_slices(time_slices.WorkerExited(state.name))
                state.freed_bytes, state.granted_bytes = state.granted_bytes, 0
            case _:
                assert_never(command)

    def _tell_router(self, event: admission_events.Event) -> None:
        self._services.router.tell(mail.AdmissionEvent(event))

    def _announce(self, before: ModelState) -> None:
        state, machine_state = self._state, self._state.machine.state
        error = self._error()
        levels: dict[ModelState, Level] = {"backoff": "warning", "failed": "error"}
        self._notify(
            "model_state",
            level=levels.get(state.model_state, "info"),
            before=before,
            state=state.model_state,
            reason=error.message if error is not None else None,
        )
        cause = process_exit.cause_of(error)
        self._services.observe(telemetry.StateChanged(state.name, state.model_state, cause))
        self._publish()
        refused = isinstance(machine_state, lifecycle_events.Failed) and machine_state.refused
        if refused or (
            isinstance(machine_state, lifecycle_events.Stopping) and machine_state.then == "failed"
        ):
            # The registry decides whether the model's requests continue to wait.
            self._tell_router(admission_events.ModelChanged(state.name, "waiting"))
        else:
            self._tell_router(
                admission_events.ModelChanged(state.name, _standing(machine_state), error)
            )
        self._services.registry.tell(
            mail.WorkerChanged(state.name, state.model_state, error, refused, state.freed_bytes)
        )
        state.freed_bytes = 0

    def _error(self) -> ErrorInfo | None:
        """Return why the model does not run, with the newest events if its worker was given up."""
        error = self._state.machine.error
        match self._state.machine.state:
            case lifecycle_events.Failed(refused=False) if error is not None:
                detail = {**error.detail, "story": self._state.history.story()}
                return ErrorInfo(error.code, error.message, error.retryable, detail)
            case _:
                return error

    def _publish(self) -> None:
        state = self._state
        self._services.statuses.models[state.name] = ModelStatus(
            name=state.name,
            source=state.load.source,
            state=state.model_state,
            worker_pid=state.machine.pid,
            ranks=state.ranks,
            device=state.device if self._services.statuses.devices > 1 else None,
            restarts=state.machine.restarts,
            kv=state.load.kv,
            granted_bytes=state.granted_bytes,
            info=state.info,
            stats=state.stats,
            error=self._error(),
        )

    def _notify(self, event: str, *, level: Level = "info", **fields: object) -> None:
        self._services.notify(Notice(event, level, {"model": self._state.name, **fields}))


def _tokenize_failed(name: str) -> WorkerDied:
    return WorkerDied(
        f"the process of {name} ended before it tokenized the text; send the request again",
        model=name,
    )


def _standing(state: lifecycle_events.State) -> admission_events.Availability:
    match state:
        case lifecycle_events.Ready():
            return "ready"
        case lifecycle_events.Failed():
            return "failed"
        case (
            lifecycle_events.Stopped()
            | lifecycle_events.Draining()
            | lifecycle_events.Stopping(then="stopped")
        ):
            return "closing"
        case _:
            return "waiting"
