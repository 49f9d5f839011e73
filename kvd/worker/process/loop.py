"""The worker's one thread: read commands, step the engine, hand its reports on.

It waits for nobody while it has work: commands are read if there are any, reports are written as
far as the socket takes them, the rest waits in the `Outbox`. It sleeps in ``poll`` only when the
engine has nothing to do. The end of the stream means that the daemon is gone, and so is the
worker at once (`Orphaned`; `kvd.worker.process.orphan` covers the time inside a step).

Does not cover: what a step does (`kvd.worker.engine`), and the process (`kvd.worker.__main__`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import time
from collections import deque
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

from kvd.worker.process import memory
from kvd.worker.process.outbox import Outbox
from kvd.worker.process.phases import Phases
from kvd.worker.process.time_slice_gate import TimeSliceGate, uses_time_slices
from protocol.errors import Draining, InternalError, KvdError, LocalProtocolError
from protocol.framing import FrameDecoder, decode_command
from protocol.worker import (
    CancelRow,
    Command,
    Grant,
    LoadFailed,
    LoadModel,
    MemoryRequested,
    Phase,
    PhaseChanged,
    Progress,
    Ready,
    Reclaim,
    Report,
    RowAccepted,
    RowFailed,
    RowFinished,
    Started,
    StartLevel,
    Stats,
    Stop,
    Submit,
    TimeSlice,
    TimeSliceOver,
    TimeSliceRequested,
    Tokenize,
    Tokenized,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvd.worker.engine import Engine
    from protocol.types import WorkerStats

STATS_INTERVAL_S = 0.25
"""Between reports of counters while there is work."""
IDLE_INTERVAL_S = 5.0
"""The same without work: a wake-up now and then, so that rates and memory do not go stale."""
SIGN_INTERVAL_S = 5.0
"""After which a phase is told again when it begins anew: a step may be long in all."""
LONG_WAIT_S = 0.25
"""After which waiting for a turn is told as a phase: most waits are a slice of somebody else's."""
RATE_WINDOW_S = 2.0
"""Over which tokens a second are counted."""
_READ_BYTES = 64 * 1024
_WRITE_BYTES = 64 * 1024
"""Reports are encoded in pieces of this size: what is encoded cannot be merged any more."""

_log = logging.getLogger("kvd.worker")


class Orphaned(Exception):
    """The daemon closed its end."""


class _Stopped(Exception):
    """The daemon wants the worker to end while it loads."""


class Loop:
    """One worker's life over a connected, non-blocking socket: `run` it."""

    def __init__(
        self,
        sock: socket.socket,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.monotonic,
        footprint: Callable[[], int] = memory.footprint,
    ) -> None:
        self._link = _Link(sock)
        self._engine = engine
        self._clock = clock
        self._footprint = footprint
        self._rows: set[str] = set()
        """Accepted and not over: what a drain waits for."""
        self._texts: deque[Tokenize] = deque()
        """To be told the tokens of."""
        self._stopping = False
        self._grants = 0
        """Requests for memory so far, of the load."""
        self._rate = _Rate()
        self._stats_at = -float("inf")
        self._worked = False
        """Whether there was a step since the last counters."""
        self._phase: Phase = "idle"
        """As the daemon knows it."""
        self._phases = Phases()
        self._gate = TimeSliceGate(on=False)
        self._sign_due = clock() + SIGN_INTERVAL_S
        engine.watch(self._enter)

    def run(self) -> None:
        """Load, serve and return when the daemon asked for the end and has all reports.

        Raises `Orphaned` if the daemon is gone, and whatever a broken engine raises.
        """
        self._link.put(Started(pid=os.getpid(), mlx=_version("mlx"), mlx_lm=_version("mlx-lm")))
        try:
            if self._load():
                self._serve()
        except _Stopped:
            pass
        self._say(self._gate.work_done(self._clock()))  # others need not wait for the process's end
        self._engine.close()
        self._link.flush()

    # Loading.

    def _load(self) -> bool:
        command = self._link.next_command()
        if isinstance(command, Stop):
            return False
        if not isinstance(command, LoadModel):
            raise LocalProtocolError(f"the first command is {command}, not a load")
        try:
            info = self._engine.load(command, self._progress, self._ask_grant)
        except KvdError as error:
            self._link.put(LoadFailed(error=error.info()))
            return False
        # What was imported and loaded stays: looking through it again and again takes 30 ms a time.
        gc.collect()
        gc.freeze()
        self._gate = TimeSliceGate(on=uses_time_slices(command.time_slices, info.device))
        self._link.put(Ready(info=info))
        return True

    def _progress(self, stage: str, fraction: float) -> None:
        self._link.put(Progress(stage=stage, fraction=fraction))
        self._link.pump()
        self._heed_stop()

    def _ask_grant(self, total_bytes: int, reason: str) -> Grant:
        self._grants += 1
        seq = self._grants
        self._link.put(MemoryRequested(seq=seq, total_bytes=total_bytes, reason=reason))
        while True:
            self._heed_stop()
            for at, command in enumerate(self._link.commands):
                if isinstance(command, Grant) and command.seq == seq:
                    del self._link.commands[at]
                    return command
            self._link.wait(None)

    def _heed_stop(self) -> None:
        if any(isinstance(command, Stop) for command in self._link.commands):
            raise _Stopped

    # Serving.

    def _serve(self) -> None:
        self._tell_stats()
        while True:
            self._link.pump()
            while self._link.commands:
                self._obey(self._link.commands.popleft())
            self._tokenize()
            if self._stopping and not self._rows:
                return
            if not self._engine.has_work:
                if not self._texts:
                    self._rest()
            elif self._has_turn():
                self._step()
            elif not self._texts:
                self._await_turn()

    def _enter(self, phase: Phase) -> None:
        """Tell the daemon before a phase begins: nothing can be told from within."""
        now = self._clock()
        self._phases.enter(phase, now)
        if phase != self._phase or now >= self._sign_due:
            self._phase = phase
            self._sign_due = now + SIGN_INTERVAL_S
            self._link.put(PhaseChanged(phase=phase))
            self._link.send()

    def _step(self) -> None:
        timed = self._gate.is_timed
        if timed:
            self._say(self._gate.before_step(self._clock()))
        reports = self._engine.step()
        self._phases.leave(self._clock())
        if timed:  # before the tokens: others wait for it
            self._say(self._gate.after_step(self._clock()))
        for report in reports:
            if isinstance(report, (RowFinished, RowFailed)):
                self._rows.discard(report.rid)
            self._link.put(report)
        self._worked = True
        self._tell_stats()

    def _has_turn(self) -> bool:
        self._say(self._gate.request_slice(prefills=self._engine.reads_prompts))
        return self._gate.is_open

    def _await_turn(self) -> None:
        """Sleep until a command comes; only a long wait is worth telling."""
        self._link.wait(LONG_WAIT_S)
        if not self._link.commands:
            self._enter("idle")
        self._tell_stats()

    def _say(self, report: TimeSliceRequested | TimeSliceOver | None) -> None:
        """Tell about turns at once: others wait for it."""
        if report is not None:
            self._link.put(report)
            self._link.send()

    def _rest(self) -> None:
        """Sleep until a command comes or a request's deadline does."""
        self._say(self._gate.work_done(self._clock()))
        self._enter("idle")
        while not (self._link.commands or self._engine.has_work):
            due = min(self._stats_due, self._engine.next_deadline or self._stats_due)
            self._link.wait(max(0.0, due - self._clock()))
            self._tell_stats()

    def _obey(self, command: Command) -> None:  # noqa: C901 - one match over one union
        match command:
            case Submit():
                self._submit(command)
            case Tokenize():
                self._texts.append(command)
            case CancelRow():
                self._engine.cancel(command.rid)
            case Grant():
                self._engine.granted(command)
            case Reclaim():
                self._engine.reclaim(command)
            case StartLevel():
                self._engine.start_level(command)
            case TimeSlice():
                self._say(self._gate.apply(command, self._clock()))
            case Stop():
                self._stopping = True
                if not command.drain:
                    raise _Stopped
            case LoadModel():
                raise LocalProtocolError("a worker loads one model in its life")

    def _submit(self, request: Submit) -> None:
        if self._stopping:
            self._refuse(request, Draining("the model takes no new work; it is being unloaded"))
            return
        self._enter("tokenize")
        try:
            prompt_tokens = self._engine.submit(request)
        except KvdError as error:
            self._refuse(request, error)
        except Exception:  # noqa: BLE001 - a tokenizer that breaks on one prompt must not cost all
            _log.exception("request %s could not be taken", request.rid)
            self._refuse(request, InternalError("the worker failed to take it; its log says why"))
        else:
            self._rows.add(request.rid)
            self._link.put(RowAccepted(rid=request.rid, prompt_tokens=prompt_tokens))
        self._phases.leave(self._clock())

    def _tokenize(self) -> None:
        """Tell the tokens of one text: others wait behind the next step, and delay none."""
        if not self._texts:
            return
        request = self._texts.popleft()
        self._enter("tokenize")
        try:
            self._link.put(self._engine.tokenize(request))
        except KvdError as error:
            self._link.put(Tokenized(seq=request.seq, error=error.info()))
        except Exception:  # noqa: BLE001 - what a tokenizer raises must not cost the rows
            _log.exception("a text could not be tokenized")
            broken = InternalError("the tokenizer failed on this text; the log says why")
            self._link.put(Tokenized(seq=request.seq, error=broken.info()))
        self._phases.leave(self._clock())

    def _refuse(self, request: Submit, error: KvdError) -> None:
        self._link.put(RowFailed(rid=request.rid, error=error.info()))

    # Counters.

    @property
    def _stats_due(self) -> float:
        return self._stats_at + (STATS_INTERVAL_S if self._worked else IDLE_INTERVAL_S)

    def _tell_stats(self) -> None:
        now = self._clock()
        if now >= self._stats_due:
            self._stats_at = now
            self._worked = False
            self._link.put(Stats(stats=self._completed(self._engine.stats(), now)))

    def _completed(self, stats: WorkerStats, now: float) -> WorkerStats:
        return msgspec.structs.replace(
            stats,
            tokens_per_s=self._rate.at(now, stats.generated_tokens),
            phases=self._phases.spreads(),
            memory=msgspec.structs.replace(stats.memory, footprint=self._footprint()),
        )


class _Link:
    """The socket with its framing: commands in, reports out, neither ever blocks but in `wait`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._decoder = FrameDecoder()
        self._outbox = Outbox()
        self._unsent = b""
        self.commands: deque[Command] = deque()
        """Read and not yet obeyed."""

    def put(self, report: Report) -> None:
        """Queue a report."""
        self._outbox.put(report)

    def pump(self) -> None:
        """Read what is there and write what goes."""
        self._read()
        self._write()

    def send(self) -> None:
        """Write what goes."""
        self._write()

    def next_command(self) -> Command:
        """Wait for a command."""
        while not self.commands:
            self.wait(None)
        return self.commands.popleft()

    def flush(self) -> None:
        """Wait until the daemon has read all reports."""
        while self._write():
            self.wait(None)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something can be read, written or the time is over; do what can be done."""
        unsent = self._write()
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if unsent else 0))
        self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        self.pump()

    def _read(self) -> None:
        try:
            while data := self._sock.recv(_READ_BYTES):
                self.commands.extend(map(decode_command, self._decoder.receive(data)))
                if len(data) < _READ_BYTES:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            raise Orphaned from error
        raise Orphaned

    def _write(self) -> bool:
        """Write as much as goes; return whether something is left."""
        try:
            while self._unsent or len(self._outbox):
                if not self._unsent:
                    self._unsent = self._outbox.take(_WRITE_BYTES)
                sent = self._sock.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return True
        except OSError as error:
            raise Orphaned from error
        return False


class _Rate:
    """Tokens a second over a window that ends now."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def at(self, now: float, total: int) -> float:
        """Take a reading and return the rate."""
        self._readings.append((now, total))
        while len(self._readings) > 2 and self._readings[1][0] <= now - RATE_WINDOW_S:
            self._readings.popleft()
        then, before = self._readings[0]
        return (total - before) / (now - then) if now > then else 0.0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
