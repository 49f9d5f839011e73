"""Worker processes on simulated time: the real loop, link and outbox around the fake engine.

A turn of the loop runs at once and ends when the loop would wait. Its engine's sleeps only advance
the process's own clock, and the next turn starts when simulated time has caught up. What the loop
writes travels to the daemon as bytes, with a delay, and is lost or cut if the process is killed
before it was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from actors.ports import Exit
from kvd.worker.fake.engine import FakeEngine
from kvd.worker.fake.row import FakeRow
from kvd.worker.process.link import Link
from kvd.worker.process.loop import Loop, _Stopped
from kvd.worker.process.memory import Reading
from kvd.worker.process.time_slice_gate import TimeSliceGate, uses_time_slices
from protocol import worker as wire
from protocol.errors import KvdError
from protocol.framing import FrameDecoder, decode_report, encode_frame
from protocol.types import Usage, record_level

FOREVER_S = 1e6
"""A sleep of this length never ends: the engine hangs."""
SOCKET_BYTES = 2048
"""Bytes on their way to the daemon after which the socket takes no more."""


class _Waits(Exception):
    """The loop waits for a command, at most for these seconds."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__()
        self.timeout_s = timeout_s


class _Socket:
    """The methods of a socket that the link uses."""

    def __init__(self, process: LoopProcess) -> None:
        self.send = process.write
        self.recv = process.read

    def setblocking(self, _: bool) -> None:
        pass

    def fileno(self) -> int:
        return 0


class _SimLink(Link):
    """A link whose waits end the turn."""

    def __init__(self, process: LoopProcess) -> None:
        self._process = process
        super().__init__(_Socket(process))  # type: ignore[arg-type]

    def wait(self, timeout_s: float | None) -> None:
        self.send()
        raise _Waits(timeout_s)

    def pump(self) -> None:
        if self._process.is_ahead:
            raise _Waits(0.0)
        super().pump()


class _Engine(FakeEngine):
    """The fake engine, which also records the true precision levels of its rows."""

    def __init__(self, process: LoopProcess, truth: LevelsTruth) -> None:
        super().__init__(sleep=process.sleep, clock=process.clock)
        self._truth = truth

    def _prefill(self) -> None:
        super()._prefill()
        for rid in self._scheduler.victims():
            self._note(rid)

    def _decode(self, row: FakeRow) -> None:
        self._note(row.rid)
        super()._decode(row)

    def _note(self, rid: str) -> None:
        self._truth.ran(rid, self._scheduler.find(rid).level)


class _Footprint(Reading):
    """The simulated footprint, which no thread reads."""

    def latest(self) -> int:
        return self.read_now()

    newest = latest


class _SimLoop(Loop):
    """The worker's loop; `turn` runs it until it waits."""

    def __init__(self, process: LoopProcess, engine: FakeEngine) -> None:
        self._process = process
        super().__init__(
            _Socket(process),  # type: ignore[arg-type]
            engine,
            clock=process.clock,
            footprint=_Footprint(process.footprint, process.clock),
        )
        self._link = _SimLink(process)
        self._loading: wire.LoadModel | None = None
        self._loaded = self._leaving = False
        self._link.put(wire.Started(pid=process.pid))
        self._link.send()

    def turn(self) -> bool:
        """Run until the loop waits, which raises `_Waits`; return whether it ended."""
        if not self._leaving:
            with contextlib.suppress(_Stopped):
                if self._loaded or self._load():
                    self._serve()
            self._leaving = True
            self._send_now(self._gate.work_done(self._clock()))
        if self._link.send():
            raise _Waits(None)
        return True

    def _load(self) -> bool:
        link = self._link
        link._read()
        if any(isinstance(command, wire.Stop) for command in link.commands):
            return False
        if self._loading is None:
            if not link.commands:
                raise _Waits(None)
            command = link.commands.popleft()
            assert isinstance(command, wire.LoadModel)
            self._loading = command
        try:
            info = self._engine.load(self._loading, self._report_progress, self._request_grant)
        except KvdError as error:
            link.put(wire.LoadFailed(error=error.info()))
            return False
        self._gate = TimeSliceGate(on=uses_time_slices(self._loading.time_slices, "simulated"))
        link.put(wire.Ready(info=info))
        self._loaded = True
        return True

    def _report_progress(self, stage: str, fraction: float) -> None:
        self._link.put(wire.Progress(stage=stage, fraction=fraction))
        self._link.send()

    def _request_grant(self, total_bytes: int, reason: str) -> wire.Grant:
        """Return the grant; before it has arrived, request it once and wait."""
        for at, command in enumerate(self._link.commands):
            if isinstance(command, wire.Grant) and command.seq == 1:
                del self._link.commands[at]
                return command
        if not self._memory_requests:
            self._memory_requests = 1
            self._link.put(wire.MemoryRequested(seq=1, total_bytes=total_bytes, reason=reason))
        self._link.send()
        raise _Waits(None)


class _Hangs(Exception):
    """The engine sleeps for ever."""


class LevelsTruth:
    """The precision levels at which requests really ran, over all their processes."""

    def __init__(self) -> None:
        self._rows: dict[str, set[int]] = {}
        """Levels at which the schedulers had a request."""
        self._tokens: dict[str, list[int]] = {}
        """Levels of the tokens that the daemon received, in order."""
        self._cut: set[str] = set()
        """Requests of which a killed daemon received tokens, perhaps without recording them."""

    def ran(self, rid: str, level: int) -> None:
        self._rows.setdefault(rid, set()).add(level)

    def daemon_killed(self) -> None:
        self._cut |= self._tokens.keys()
        self._tokens.clear()

    def reported(self, report: wire.Report) -> None:
        """Check a report: a request's usage has the levels of its tokens, and no others."""
        match report:
            case wire.RowTokens(rid=rid, level=level, tokens=[_, *_]):
                assert level in self._rows[rid], f"{rid} never ran at level {level}"
                record_level(self._tokens.setdefault(rid, []), level)
            case wire.RowFinished(rid=rid, usage=usage):
                self.check(rid, usage)

    def check(self, rid: str, usage: Usage) -> None:
        levels = usage.levels
        assert set(levels) <= self._rows.get(rid, set()), f"{rid}: {levels} but {self._rows}"
        assert all(a != b for a, b in pairwise(levels)), f"{rid}: {levels}"
        tokens = self._tokens.pop(rid, [])
        known = levels[len(levels) - len(tokens) :] if rid in self._cut else levels
        assert known == tokens, f"{rid}: {levels}, its tokens had {tokens}"


@dataclass
class _Written:
    """Bytes on their way to the daemon."""

    at: float
    due: float
    data: bytes


class LoopProcess:
    """One worker process, with its port to the daemon, its socket, and its faults."""

    def __init__(
        self,
        pid: int,
        name: str,
        draw: random.Random,
        delay_s: Callable[[], float],
        on_report: Callable[[wire.Report], None],
        on_exit: Callable[[Exit], None],
        levels: LevelsTruth,
    ) -> None:
        self.pid, self.name = pid, name
        self.pids: tuple[int, ...] = (pid,)
        self._levels = levels
        self.exit: Exit | None = None
        self.lie = 1.0
        """The reported footprint is the real one times this."""
        self._draw, self._delay_s = draw, delay_s
        self._on_report, self._on_exit = on_report, on_exit
        self._time = asyncio.get_running_loop()
        self._at = self._time.time()
        """The process's clock during a turn, and when its last turn ended."""
        self._written: deque[_Written] = deque()
        self._frames = FrameDecoder()
        self._timer: asyncio.TimerHandle | None = None
        self._delivery: asyncio.TimerHandle | None = None
        self._incoming: deque[bytes] = deque()
        self._arriving: deque[bytes] = deque()
        self._commands_due = self._at
        self._cut = False
        """Whether the daemon has closed its end."""
        self._hangs = False
        self._paused_until = 0.0
        self._returncode: int | None = None
        self._ended_at = 0.0
        self.engine = _Engine(self, levels)
        self._loop = _SimLoop(self, self.engine)
        self._wake_at(self._at)

    def __repr__(self) -> str:
        return f"process {self.pid} of {self.name}"

    # The process's port.

    def send(self, command: wire.Command) -> None:
        if self.exit is None:
            self._commands_due = max(self._commands_due, self._time.time() + self._delay_s())
            self._arriving.append(encode_frame(command))
            self._time.call_at(self._commands_due, self._arrive)

    def terminate(self) -> None:
        if not self._hangs:
            self.die(-15)

    def kill(self) -> None:
        self.die(-9)

    @property
    def alive(self) -> bool:
        return self.exit is None

    # Faults.

    def die(self, returncode: int, rank: int = 0) -> None:
        """End the process now. What it has not written yet is lost, perhaps within a frame."""
        if self._returncode is not None or self.exit is not None:
            return
        now = self._time.time()
        while self._written and self._written[-1].at > now:
            self._written.pop()
        if self._written and self._draw.random() < 0.5:
            last = self._written[-1]
            last.data = last.data[: self._draw.randrange(len(last.data))]
        self._end(returncode, now)

    def pause(self, seconds: float, rank: int = 0) -> None:
        """Stop the process for a while, as SIGSTOP does; infinity: until it is killed."""
        now = self._time.time()
        if seconds > FOREVER_S:
            self._hangs = True
            while self._written and self._written[-1].at > now:
                self._written.pop()
            return
        self._paused_until = max(self._paused_until, now + seconds)
        for it in self._written:
            if it.at > now:
                it.at += seconds
                it.due += seconds
        self._schedule_delivery()

    def orphan(self) -> None:
        """Close the daemon's end: nothing reaches it any more, and the process ends."""
        self._cut = True
        for timer in (self._timer, self._delivery):
            if timer is not None:
                timer.cancel()
        self._written.clear()
        self.exit = self.exit or Exit(0)

    def footprint(self) -> int:
        return int(self.held_bytes * self.lie)

    # Memory.

    @property
    def granted_bytes(self) -> int:
        admission = getattr(self.engine, "_admission", None)
        return 0 if admission is None else admission.budget.granted_bytes

    @property
    def held_bytes(self) -> int:
        """What the process holds: weights, the pages of admitted rows, and cached prefixes."""
        admission = getattr(self.engine, "_admission", None)
        if admission is None:
            return 0
        reserved = admission.scheduler.reserved_pages
        cached = self.engine._reclaiming.memory.cached_pages
        budget = admission.budget
        return budget.base_bytes + (reserved + cached) * budget.page_bytes

    # The socket that the loop uses.

    def write(self, data: bytes) -> int:
        room = SOCKET_BYTES - sum(len(it.data) for it in self._written)
        if room <= 0:
            raise BlockingIOError
        taken = data[:room]
        last = self._written[-1].due if self._written else 0.0
        self._written.append(_Written(self._at, max(last, self._at + self._delay_s()), taken))
        self._schedule_delivery()
        return len(taken)

    def read(self, size: int) -> bytes:
        """Return all that has arrived, as a stream does; the link then reads no further."""
        if not self._incoming:
            raise BlockingIOError
        data = b"".join(self._incoming)
        self._incoming.clear()
        if len(data) > size:
            self._incoming.append(data[size:])
        return data[:size]

    # Time.

    def clock(self) -> float:
        return self._at

    @property
    def is_ahead(self) -> bool:
        return self._at > self._time.time()

    def sleep(self, seconds: float) -> None:
        self._at += seconds
        if seconds >= 3600.0:
            raise _Hangs

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._time.call_at(when, self._turn)

    def _turn(self) -> None:
        self._timer = None
        if self._hangs or self._returncode is not None:
            return
        now = self._time.time()
        if now < self._paused_until:
            self._wake_at(self._paused_until)
            return
        self._at = max(self._at, now)
        try:
            ended = self._loop.turn()
        except _Waits as wait:
            if self.is_ahead:
                self._wake_at(self._at)
            elif wait.timeout_s is not None:
                self._wake_at(self._at + wait.timeout_s)
        except _Hangs:
            self._hangs = True
        else:
            assert ended
            self._end(0, self._at)

    def _arrive(self) -> None:
        # Timers of the same time fire in any order, but commands must not change theirs.
        data = self._arriving.popleft()
        if self._cut or self._returncode is not None:
            return
        self._incoming.append(data)
        if not self.is_ahead:
            self._turn_soon()

    def _turn_soon(self) -> None:
        now = self._time.time()
        if self._timer is None or self._timer.when() > now:
            self._wake_at(now)

    def _end(self, returncode: int, when: float) -> None:
        self._returncode, self._ended_at = returncode, when
        if self._timer is not None:
            self._timer.cancel()
        self._schedule_delivery()

    # To the daemon.

    def _schedule_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        if self._cut:
            return
        if self._written:
            self._delivery = self._time.call_at(self._written[0].due, self._deliver)
        elif self._returncode is not None:
            due = max(self._time.time(), self._ended_at) + self._delay_s()
            self._delivery = self._time.call_at(due, self._deliver_exit)

    def _deliver(self) -> None:
        self._delivery = None
        was_full = sum(len(it.data) for it in self._written) >= SOCKET_BYTES
        while self._written and self._written[0].due <= self._time.time():
            for frame in self._frames.receive(self._written.popleft().data):
                report = decode_report(frame)
                self._levels.reported(report)
                self._on_report(report)
        self._schedule_delivery()
        if was_full and self._returncode is None and not self.is_ahead:
            self._turn_soon()

    def _deliver_exit(self) -> None:
        self._delivery = None
        assert self._returncode is not None
        self.exit = Exit(self._returncode)
        self._on_exit(self.exit)
