"""A worker's shell: one for each model, around the lifecycle machine and the process.

Does what the machine says, translates the process's reports into the machine's events, and passes
rows, grants and news on to those whom they concern. Decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never, cast

from msgspec.structs import replace

from actors import mail, telemetry
from actors.machines import governor_events, lifecycle, lifecycle_events
from actors.machines.process_exit import cause_of
from actors.ports import Notice
from actors.runtime.actor import Actor, DeferredReply, MailboxFull
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from protocol import worker as wire
from protocol.errors import ErrorInfo, WorkerDied
from protocol.types import KVSpec, ModelInfo, ModelState, ModelStatus, WorkerStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.machines.admission_events import Availability
    from actors.mail import GovernorMail, RegistryMail, RouterMail, TimeSlicesMail, WorkerMail
    from actors.ports import Exit, Level, Notify, Observe, SpawnWorker, WorkerProcess
    from actors.runtime.actor import Ref
    from actors.status import StatusTable


@dataclass(frozen=True)
class WorkerServices:
    """Whom and what a worker needs; the same for all of them."""

    spawn: SpawnWorker
    router: Ref[RouterMail]
    time_slices: Ref[TimeSlicesMail]
    governor: Ref[GovernorMail]
    supervisor: Ref[RegistryMail]
    board: StatusTable
    notify: Notify
    observe: Observe
    lives: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of processes, each given once: a model that was unloaded comes back as another."""


@dataclass
class WorkerState:
    """All that a worker holds: it outlives a restart of the shell."""

    name: str
    load: wire.LoadModel
    around: WorkerServices
    machine: lifecycle.Lifecycle
    weight: float = 1.0
    """Of its turns."""
    process: WorkerProcess | None = None
    life: int = 0
    """The number of its process."""
    early: list[mail.Reported | mail.HasExited] = field(default_factory=list)
    """What a process said before the spawn told us of it."""
    rows: dict[str, wire.Submit] = field(default_factory=dict)
    """Not yet sent."""
    texts: dict[int, DeferredReply[wire.Tokenized]] = field(default_factory=dict)
    """Who waits for the tokens of a text, by the number that the process knows it by."""
    asked: int = 0
    """Such texts so far."""
    serving: bool = False
    """As the governor knows it: there are requests in the process."""
    granted_bytes: int = 0
    freed_bytes: int = 0
    """Granted to the last process until its exit."""
    info: ModelInfo | None = None
    stats: WorkerStats = field(default_factory=WorkerStats)

    def __post_init__(self) -> None:
        self.journal: EventHistory[lifecycle_events.Event, lifecycle_events.Command] = EventHistory(
            self.machine, signs=lifecycle_events.FREQUENT
        )

    @property
    def state(self) -> ModelState:
        """The machine's state in the words of the protocol."""
        return cast("ModelState", type(self.machine.state).__name__.lower())

    @property
    def source(self) -> str:
        """Where the model comes from."""
        return self.load.source

    @property
    def kv(self) -> KVSpec:
        """How its cache is stored."""
        return self.load.kv


class Worker(Actor["WorkerMail"]):
    """Keeps one model's process alive, and speaks for it."""

    turn = 64  # a read of the socket may hold thousands of reports, and each causes others

    def __init__(self, berth: WorkerState) -> None:
        berth.machine.check()
        self._berth = berth
        self._around = berth.around
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        """Show the model on the board."""
        self._publish()

    def on_restart(self, error: BaseException) -> None:
        """Do not trust a process whose words made us fail."""
        self._do(lifecycle_events.Fault(f"{type(error).__name__}: {error}"))

    def on_stop(self) -> None:
        """Leave no process behind that nobody watches."""
        self._alarm.cancel()
        if self._berth.process is not None:
            self._berth.process.kill()

    def check(self) -> None:
        """Check the invariants."""
        self._berth.machine.check()
        running = self._berth.machine.pid is not None
        assert running == (self._berth.process is not None), "a process, or none?"

    def receive(self, message: WorkerMail) -> object:  # noqa: C901, PLR0912 - one match
        """Handle a message."""
        berth = self._berth
        match message:
            case mail.Order(event=event):
                self._do(event)
            case mail.RunRow(submit=submit):
                berth.rows[submit.rid] = submit
                self._do(lifecycle_events.RequestAssigned(submit.rid))
            case mail.CancelRow(rid=rid):
                self._cancel(rid)
            case mail.Granted(grant=grant, life=life):
                self._granted(grant, life)
            case mail.Commanded(command=command, life=life):
                if life == berth.life:
                    self._send(command)
            case mail.StillWaits(life=life):
                if life == berth.life and berth.process is not None:
                    self._do(lifecycle_events.SignOfLife())
            case mail.WeightIs(weight=weight):
                berth.weight = weight
                self._around.time_slices.tell(mail.TimeSlicesWeighed(berth.name, weight))
            case mail.TimeSliceGiven(turn=turn, life=life):
                if life == berth.life:
                    self._send(turn)
            case mail.TokensAsked(command=command):
                return self._tokenize(command)
            case mail.HasProcess(process=process):
                self._has_process(process)
            case mail.HasNoProcess(error=error):
                self._do(lifecycle_events.SpawnFailed(str(error) or type(error).__name__))
            case mail.Reported() | mail.HasExited():
                if message.life == berth.life:
                    self._from_process(message)
            case mail.AlarmFired():
                self._do(lifecycle_events.AlarmFired())
            case _:
                assert_never(message)
        return None

    def _tokenize(self, asked: wire.Tokenize) -> DeferredReply[wire.Tokenized]:
        """Ask the process; it answers between two steps, or dies first."""
        berth = self._berth
        if berth.process is None or berth.info is None:
            raise _untold(berth.name)
        later: DeferredReply[wire.Tokenized] = DeferredReply()
        berth.asked += 1
        berth.texts[berth.asked] = later
        self._send(replace(asked, seq=berth.asked))
        return later

    def _ask(self, wish: wire.MemoryRequested) -> None:
        berth = self._berth
        reclaimable = wish.reclaimable if berth.info is not None else None
        asked = mail.GrantAsked(
            berth.name, self.ref, berth.life, wish.seq, wish.total_bytes, reclaimable, wish.resuming
        )
        self._around.governor.tell(asked)

    def _govern(self, event: governor_events.Event) -> None:
        self._around.governor.tell(mail.Governed(event))

    def _cancel(self, rid: str) -> None:
        if rid in self._berth.machine.requests:
            self._send(wire.CancelRow(rid=rid))

    def _granted(self, grant: wire.Grant, life: int) -> None:
        berth = self._berth
        if berth.process is not None and life == berth.life:
            berth.granted_bytes = grant.total_bytes
            self._send(grant)
            self._publish()

    # -- the process ------------------------------------------------------------------------------

    def _spawn(self) -> None:
        berth, ref = self._berth, self.ref
        berth.life = next(self._around.lives)
        berth.early.clear()
        berth.info, berth.stats = None, WorkerStats()
        life = berth.life

        def on_report(report: wire.Report) -> None:
            try:
                ref.tell(mail.Reported(report, life))
            except MailboxFull:  # far beyond what one read can hold: it floods us
                if berth.process is not None:
                    berth.process.kill()

        def on_exit(end: Exit) -> None:
            ref.tell(mail.HasExited(end, life), beyond_limit=True)

        def done(process: WorkerProcess) -> None:
            if ref.alive:
                ref.tell(mail.HasProcess(process), beyond_limit=True)
            else:
                process.kill()

        self.pipe(
            self._around.spawn(berth.name, on_report=on_report, on_exit=on_exit),
            done,
            lambda error: ref.tell(mail.HasNoProcess(error), beyond_limit=True),
        )

    def _has_process(self, process: WorkerProcess) -> None:
        self._berth.process = process
        self._do(lifecycle_events.Spawned(process.pid))
        early, self._berth.early = self._berth.early, []
        for message in early:
            self._from_process(message)

    def _from_process(self, message: mail.Reported | mail.HasExited) -> None:
        if self._berth.process is None:
            self._berth.early.append(message)
        elif isinstance(message, mail.Reported):
            self._reported(message.report)
        else:
            self._has_exited(message.exit)

    def _has_exited(self, end: Exit) -> None:
        pid, self._berth.process = self._berth.machine.pid, None
        self._berth.stats = WorkerStats()
        for later in self._berth.texts.values():
            later.fail(_untold(self._berth.name))
        self._berth.texts.clear()
        self._notify("worker_exit", pid=pid, returncode=end.returncode)
        self._do(lifecycle_events.Exited(end.returncode, end.starved))

    def _reported(self, report: wire.Report) -> None:  # noqa: C901, PLR0912 - one match over one union
        berth, around = self._berth, self._around
        match report:
            case wire.Started():
                self._notify("worker_started", pid=report.pid, mlx=report.mlx)
                self._do(lifecycle_events.Started())
            case wire.Progress(stage=stage, fraction=fraction):
                self._do(lifecycle_events.SignOfLife())
                around.supervisor.tell(mail.LoadProgressed(berth.name, stage, fraction))
            case wire.Ready(info=info):
                berth.info = info
                self._govern(governor_events.ModelReady(berth.name))
                self._do(lifecycle_events.Loaded())
            case wire.LoadFailed(error=error):
                self._do(lifecycle_events.LoadFailed(error))
            case wire.MemoryRequested():
                self._do(lifecycle_events.SignOfLife())
                self._ask(report)
            case wire.PhaseChanged(phase=phase):
                self._do(lifecycle_events.PhaseEntered(phase))
            case wire.Tokenized(seq=seq):
                self._do(lifecycle_events.SignOfLife())
                if (asker := berth.texts.pop(seq, None)) is not None:
                    asker.answer(report)
            case wire.Stats(stats=stats):
                if stats.reclaimable != berth.stats.reclaimable:
                    self._govern(governor_events.ReclaimableReported(berth.name, stats.reclaimable))
                berth.stats = stats
                around.observe(telemetry.StatsReported(berth.name, berth.life, stats))
                self._do(lifecycle_events.SignOfLife())
                self._publish()
            case wire.TimeSliceRequested(step_s=step_s):
                asked = mail.TimeSliceAsked(berth.name, self.ref, berth.life, berth.weight, step_s)
                around.time_slices.tell(asked)
            case wire.TimeSliceOver():
                self._do(lifecycle_events.SignOfLife())
                around.time_slices.tell(mail.TimeSliceEnded(berth.name, report))
            case wire.Reclaimed(seq=seq, freed_bytes=freed, exhausted=exhausted):
                self._do(lifecycle_events.SignOfLife())
                self._govern(governor_events.ReclaimFinished(berth.name, seq, freed, exhausted))
            case (
                wire.RowAccepted()
                | wire.RowPrompt()
                | wire.RowQueued()
                | wire.RowAdmitted()
                | wire.RowPreempted()
                | wire.RowResumed()
            ):
                self._do(lifecycle_events.SignOfLife())
                around.router.tell(mail.RowReported(report))
            case wire.RowTokens() | wire.ChoiceFinished():
                self._do(lifecycle_events.TokenGenerated())
                around.router.tell(mail.RowReported(report))
            case wire.RowFinished(rid=rid) | wire.RowFailed(rid=rid):
                around.router.tell(mail.RowReported(report))
                self._do(lifecycle_events.RequestFinished(rid))
            case _:
                assert_never(report)

    # -- the machine ------------------------------------------------------------------------------

    def _do(self, event: lifecycle_events.Event) -> None:
        machine = self._berth.machine
        before = (self._berth.state, _availability(machine.state))
        now = asyncio.get_running_loop().time()
        for command in self._berth.journal.handle(event, now):
            self._perform(command)
        self._alarm.set(machine.deadline)
        if bool(machine.requests) != self._berth.serving:
            self._berth.serving = not self._berth.serving
            self._govern(governor_events.ServingChanged(self._berth.name, self._berth.serving))
        if (self._berth.state, _availability(machine.state)) != before:
            self._announce(before[0])

    def _perform(self, command: lifecycle_events.Command) -> None:  # noqa: C901 - one match over one union
        berth, around = self._berth, self._around
        match command:
            case lifecycle_events.Spawn():
                self._spawn()
            case lifecycle_events.SendLoad():
                self._send(berth.load)
            case lifecycle_events.SendRequest(rid=rid):
                self._send(berth.rows.pop(rid))
            case lifecycle_events.ReturnRequest(rid=rid):
                del berth.rows[rid]
                around.router.tell(mail.RowBounced(rid))
            case lifecycle_events.SendStop():
                self._send(wire.Stop(drain=False))
            case lifecycle_events.Terminate():
                self._notify("worker_terminated", level="warning")
                if berth.process is not None:
                    berth.process.terminate()
            case lifecycle_events.Kill():
                self._notify("worker_killed", level="warning")
                if berth.process is not None:
                    berth.process.kill()
            case lifecycle_events.LoseRequests():
                died = mail.RowsDied(
                    berth.name, command.rids, command.error, command.attributable, command.again
                )
                around.router.tell(died)
            case lifecycle_events.ReleaseMemory():
                around.governor.tell(mail.MemoryFree(berth.name))
                around.time_slices.tell(mail.TimeSlicesLost(berth.name))
                berth.freed_bytes, berth.granted_bytes = berth.granted_bytes, 0
            case _:
                assert_never(command)

    def _send(self, command: wire.Command) -> None:
        if self._berth.process is not None:
            self._berth.process.send(command)

    def _announce(self, before: ModelState) -> None:
        berth, state = self._berth, self._berth.machine.state
        error = self._error()
        levels: dict[ModelState, Level] = {"backoff": "warning", "failed": "error"}
        self._notify(
            "model_state",
            level=levels.get(berth.state, "info"),
            before=before,
            state=berth.state,
            reason=error.message if error is not None else None,
        )
        cause = cause_of(error)
        self._around.observe(telemetry.StateChanged(berth.name, berth.state, cause))
        self._publish()
        refused = isinstance(state, lifecycle_events.Failed) and state.refused
        if refused or (isinstance(state, lifecycle_events.Stopping) and state.then == "failed"):
            # Whether requests for it wait on is the supervisor's word.
            self._around.router.tell(mail.ModelChanged(berth.name, "waiting"))
        else:
            self._around.router.tell(mail.ModelChanged(berth.name, _availability(state), error))
        self._around.supervisor.tell(
            mail.WorkerChanged(berth.name, berth.state, error, refused, berth.freed_bytes)
        )
        berth.freed_bytes = 0

    def _error(self) -> ErrorInfo | None:
        """Why it does not run; given up, with its story."""
        error = self._berth.machine.error
        state = self._berth.machine.state
        if error is None or not isinstance(state, lifecycle_events.Failed) or state.refused:
            return error
        detail = {**error.detail, "story": self._berth.journal.story()}
        return ErrorInfo(error.code, error.message, error.retryable, detail)

    def _publish(self) -> None:
        berth = self._berth
        self._around.board.models[berth.name] = ModelStatus(
            name=berth.name,
            source=berth.source,
            state=berth.state,
            worker_pid=berth.machine.pid,
            restarts=berth.machine.restarts,
            kv=berth.kv,
            granted_bytes=berth.granted_bytes,
            info=berth.info,
            stats=berth.stats,
            error=self._error(),
        )

    def _notify(self, event: str, *, level: Level = "info", **fields: object) -> None:
        self._around.notify(Notice(event, level, {"model": self._berth.name, **fields}))


def _untold(name: str) -> WorkerDied:
    return WorkerDied(f"{name}'s process ended before it told the tokens", model=name)


def _availability(state: lifecycle_events.State) -> Availability:
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
