"""Fakes of `actors.ports`: worker processes with scripted faults, memory readings, and settings.

A fake process follows the worker's protocol: it loads, requests memory, generates tokens at a fixed
speed, and dies or hangs where its script requires it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.ports import Exit
from kvd.daemon.gang import Gang
from protocol.costs import Estimate
from protocol.errors import ErrorInfo, InsufficientMemory, InvalidRequest, UnknownModel
from protocol.kv import KVSpec
from protocol.settings import Changed, Setting
from protocol.types import HostMemory, ModelInfo, Reclaimable, Usage, WorkerStats
from protocol.worker import (
    CancelRow,
    Command,
    Grant,
    LoadFailed,
    LoadModel,
    MemoryRequested,
    PhaseChanged,
    Progress,
    Ready,
    Report,
    RowAccepted,
    RowAdmitted,
    RowFinished,
    RowTokens,
    Started,
    Stats,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
)

IDLE_INTERVAL_S = 5.0
"""Seconds between the reports of an idle process."""
INFO = ModelInfo(
    architecture="fake",
    parameters=1,
    context_length=4096,
    vocab_size=1000,
    layers=1,
    dtype="float32",
    kv_scheme="k8v8",
    kv_layout="none",
    page_bytes=1024,
    kv_bytes_per_token=16,
    attention_path="fake",
    attention_error=0.0,
    has_chat_template=False,
    device="cpu",
)


@dataclass(frozen=True)
class Script:
    """How one process behaves."""

    start_s: float = 0.1
    load_s: float = 1.0
    token_s: float = 0.01
    weights: int = 100
    spawn_error: Exception | None = None
    load_error: ErrorInfo | None = None
    exit_at_load: int | None = None
    """Exit status if the process exits in the middle of the load."""
    crash_after: int | None = None
    """Number of tokens after which the process exits with SIGSEGV."""
    poison: dict[str, int] = field(default_factory=dict)
    """By prompt, the position of the token at which the process exits with SIGSEGV."""
    hang_at: str | None = None
    """Where the process hangs: ``start``, ``load`` or ``token``."""
    deaf: bool = False
    """Whether the process ignores `Stop` and SIGTERM."""
    kill_s: float = 0.01
    """Seconds from a signal to the exit."""
    early: bool = False
    """Whether the process sends its first report before the spawn returns."""
    stuck_rank: int | None = None
    """The rank of a gang that never reports its start."""
    nonsense: bool = False
    """Whether the process reports `Ready` twice."""


SLOW = Script(token_s=1.0)
"""So slow that a test can act between two tokens."""


def token(prompt: str, seed: int, position: int) -> int:
    """Return the token that every fake process generates at this position."""
    digest = hashlib.sha256(f"{prompt}/{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:2], "big") % 1000


def expected(count: int, prompt: str = "hello", seed: int = 7) -> list[int]:
    """Return the first tokens of a request. 7 is the first seed that `tests.sim.world` draws."""
    return [token(prompt, seed, position) for position in range(count)]


@dataclass
class Row:
    submit: Submit
    generated: int = 0
    sent: int = 0
    """Tokens that earlier processes generated."""
    cancelled: bool = False


class FakeProcess:
    """One fake worker process."""

    def __init__(
        self,
        pid: int,
        script: Script,
        on_report: Callable[[Report], None],
        on_exit: Callable[[Exit], None],
        ranks: int = 1,
        device: int = 0,
    ) -> None:
        self.pid = pid
        self.device = device
        self.pids = tuple(range(pid, pid + ranks))
        self.script = script
        self.commands: list[Command] = []
        self.signals: list[str] = []
        self.exit: Exit | None = None
        self.tokens = 0
        self.grant = 0
        self.ready = False
        self._on_report = on_report
        self._on_exit = on_exit
        self._gang = Gang(ranks)
        self._suspended = False
        self._dying = False
        self._rows: dict[str, Row] = {}
        self._answers: asyncio.Queue[Grant] = asyncio.Queue()
        self._work = asyncio.Event()
        self._tasks = [self._task(self._main())]

    @property
    def alive(self) -> bool:
        return self.exit is None

    # -- the port -------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        if self.alive:
            asyncio.get_running_loop().call_soon(self._receive, command)

    def terminate(self) -> None:
        self.signals.append("term")
        if not self.script.deaf and not self._suspended:
            self.die(-15)

    def kill(self) -> None:
        self.signals.append("kill")
        self.die(-9)

    @property
    def has_progress(self) -> bool:
        """Whether any request has generated a token in this process."""
        return any(row.generated > row.sent for row in self._rows.values())

    # -- controlled by tests --------------------------------------------------------------------

    def die(self, returncode: int, rank: int = 0) -> None:
        """End one rank, and with it the others."""
        if not self._dying:
            self._dying = True
            for task in self._tasks:
                task.cancel()
            self._end_rank(rank, returncode)

    def _end_rank(self, rank: int, returncode: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.script.kill_s, self._exited, rank, returncode)

    def suspend(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self._suspended = True

    def report(self, report: Report) -> None:
        if self.alive and not self._suspended and not self._dying:
            self._on_report(report)

    def request_memory(self, total_bytes: int) -> None:
        if self.ready:
            self.report(
                MemoryRequested(
                    seq=len(self.commands) + 100, total_bytes=total_bytes, reason="test"
                )
            )

    # -- the process ----------------------------------------------------------------------------

    def _task(self, coroutine) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine)

    def _exited(self, rank: int, returncode: int) -> None:
        for other in self._gang.exited(rank, returncode, asyncio.get_running_loop().time()):
            self._end_rank(other, -9)
        if not self._gang.alive:
            cause = self._gang.cause
            self.exit = Exit(cause.returncode, rank=cause.rank if len(self.pids) > 1 else None)
            self._on_exit(self.exit)

    def _receive(self, command: Command) -> None:
        if not self.alive or self._suspended or self._dying:
            return
        self.commands.append(command)
        match command:
            case LoadModel():
                self._tasks.append(self._task(self._load()))
            case Grant():
                self.grant = command.total_bytes
                self._answers.put_nowait(command)
            case Submit():
                sent = command.resume[0].tokens if command.resume else []
                self._rows[command.rid] = Row(command, len(sent), len(sent))
                length = len(command.prompt or command.tokens or command.messages or "")
                self.report(RowAccepted(rid=command.rid, prompt_tokens=length))
                self.report(RowAdmitted(rid=command.rid))
                self._work.set()
            case Tokenize():
                texts = [command.prompt or "", *(tool.name for tool in command.chat.tools)]
                self.report(Tokenized(seq=command.seq, count=sum(map(len, texts))))
            case CancelRow():
                if command.rid in self._rows:
                    self._rows[command.rid].cancelled = True
            case Stop() if not self.script.deaf:
                self.die(0)

    async def _main(self) -> None:
        if self.script.early:
            self._start()
            return
        await asyncio.sleep(self.script.start_s)
        if self.script.hang_at == "start":
            self.suspend()
        self._start()

    def _start(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank != self.script.stuck_rank:
                self.report(Started(pid=pid))

    async def _load(self) -> None:
        script = self.script
        for quarter in range(4):
            await asyncio.sleep(script.load_s / 4)
            if quarter == 2 and script.hang_at == "load":
                self.suspend()
            if quarter == 2 and script.exit_at_load is not None:
                self.die(script.exit_at_load)
            if quarter == 2 and script.load_error is not None:
                self.report(LoadFailed(error=script.load_error))
                self.die(0)
            self.report(Progress(stage="weights", fraction=(quarter + 1) / 4))
        self.report(MemoryRequested(seq=1, total_bytes=script.weights, reason="weights"))
        grant = await self._answers.get()
        if not grant.granted:
            error = InsufficientMemory("no room", available=grant.available_bytes).info()
            self.report(LoadFailed(error=error))
            self.die(0)
        self.ready = True
        self.report(Ready(info=INFO))
        if script.nonsense:
            self.report(Ready(info=INFO))
        await self._steps()

    async def _steps(self) -> None:
        step = 0
        while True:
            self._work.clear()
            while self._rows:
                await asyncio.sleep(self.script.token_s)
                step += 1
                self._step()
                rows = len(self._rows)
                reclaimable = Reclaimable(rows=rows, base=self.script.weights)
                self.report(
                    Stats(stats=WorkerStats(step=step, rows_running=rows, reclaimable=reclaimable))
                )
            try:
                async with asyncio.timeout(IDLE_INTERVAL_S):
                    await self._work.wait()
            except TimeoutError:
                self.report(PhaseChanged(phase="idle"))

    def _step(self) -> None:
        for rid, row in list(self._rows.items()):
            usage = Usage(prompt_tokens=1, completion_tokens=row.generated)
            submit = row.submit
            if row.cancelled:
                del self._rows[rid]
                self.report(RowFinished(rid=rid, reason="cancelled", usage=usage))
                continue
            if self.script.poison.get(submit.prompt or "") == row.generated:
                self.die(-11)
                return
            new = token(submit.prompt or "", submit.sampling.seed or 0, row.generated)
            self.report(RowTokens(rid=rid, index=row.generated, tokens=[new], text=f"{new} "))
            row.generated += 1
            self.tokens += 1
            if self.script.hang_at == "token":
                self.suspend()
            if self.script.crash_after is not None and self.tokens >= self.script.crash_after:
                self.die(-11)
                return
            if row.generated >= (submit.max_tokens or 10):
                del self._rows[rid]
                done = Usage(prompt_tokens=1, completion_tokens=row.generated)
                self.report(RowFinished(rid=rid, reason="length", usage=done))


@dataclass
class FakeSpawn:
    """Starts fake processes: a model's n-th start uses its n-th script, or its last one."""

    scripts: dict[str, list[Script]] = field(default_factory=dict)
    processes: dict[str, list[FakeProcess]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    pids: int = 100

    async def __call__(
        self,
        name: str,
        *,
        ranks: int = 1,
        device: int = 0,
        on_report: Callable[[Report], None],
        on_exit: Callable[[Exit], None],
    ) -> FakeProcess:
        scripts = self.scripts.get(name, [Script()])
        script = scripts[min(self.attempts[name], len(scripts) - 1)]
        self.attempts[name] += 1
        await asyncio.sleep(0.05)
        if script.spawn_error is not None:
            raise script.spawn_error
        self.pids += 1
        process = FakeProcess(self.pids, script, on_report, on_exit, ranks, device)
        self.pids += ranks - 1
        self.processes[name].append(process)
        if script.early:
            await asyncio.sleep(0.05)
        return process

    def last(self, name: str) -> FakeProcess:
        return self.processes[name][-1]

    def alive(self) -> list[FakeProcess]:
        return [p for started in self.processes.values() for p in started if p.alive]


class FakeMemory:
    """Memory readings that only tests change."""

    def __init__(self, *, separate: bool = False) -> None:
        self.separate = separate
        self.pressure = "normal"
        self.sizes: dict[int, int] = {}
        self.reads = 0
        self.took_s = 0.01

    def host(self) -> HostMemory:
        return HostMemory(total=10**9, available=10**8, pressure=self.pressure)

    def footprint(self, pid: int) -> int:
        return 1000

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        self.reads += 1
        await asyncio.sleep(self.took_s)
        return {pid: self.sizes[pid] for pid in pids if pid in self.sizes}


class FakeConfiguration:
    """A configuration without settings."""

    def __init__(self) -> None:
        self.table: list[Setting] = []

    async def change(self, values: Mapping[str, Any]) -> list[Changed]:
        raise InvalidRequest(f"there is no setting {next(iter(values))!r}", field="settings")

    async def reload(self) -> list[Changed]:
        return []

    async def budget_changed(self, total_bytes: int) -> None:
        pass


async def no_files(source: str, kv: KVSpec, ranks: int) -> Estimate:
    raise UnknownModel(f"{source!r} is not loaded", source=source)
