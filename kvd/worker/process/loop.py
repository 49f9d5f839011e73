"""The worker's main loop: read commands, step the engine, send its reports.

While the engine has work, the loop blocks only to wait for a time slice. Between steps it handles
commands for some milliseconds and writes as many reports as the socket takes. The rest stays in the
`Outbox`. If the daemon has closed the socket, the loop ends at once with `Orphaned`. It notices
that only between steps; during a step, `kvd.worker.process.orphan` ends the process.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from importlib import metadata

import msgspec

from kvd.worker.engine import Engine
from kvd.worker.process import memory
from kvd.worker.process.link import Link
from kvd.worker.process.memory_limit import limit
from kvd.worker.process.phases import Phases
from kvd.worker.process.time_slice_gate import TimeSliceGate, uses_time_slices
from protocol import worker as wire
from protocol.errors import Draining, InternalError, KvdError, LocalProtocolError

STATS_INTERVAL_S = 0.25
"""Seconds between `Stats` reports while there is work."""
IDLE_INTERVAL_S = 5.0
"""Seconds between `Stats` reports without work, so that rates and memory stay current."""
PHASE_INTERVAL_S = 5.0
"""Seconds after which a repeat of the last reported phase is reported again.

Earlier repeats are not reported. Later ones show the daemon that it sees many steps, not one long
step.
"""
LONG_WAIT_S = 0.25
"""Seconds of waiting for a time slice until the worker reports ``idle``; most waits are shorter."""
RATE_WINDOW_S = 2.0
COMMANDS_S = 0.005
"""Seconds for commands between two steps; the remaining commands wait for the next step."""
COMMANDS_SHARE = 0.2
"""Share of the last step's duration that commands may take, if that is longer."""
PAUSE_S = 0.2
"""Seconds without requests before idle work begins, because a request that arrives during it must
wait. Returning the memory of a prompt of 21,843 tokens took 58 ms on two H200."""
MOST_PAUSES_S = 5.0
"""Longest delay of idle work in seconds, while requests keep arriving."""

_log = logging.getLogger("kvd.worker")


class _Stopped(BaseException):
    """The daemon sent `Stop` and nothing is to be written; no error, like `Orphaned`."""


class Loop:
    """A worker over a connected socket: call `run` once."""

    def __init__(
        self,
        sock: socket.socket,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.monotonic,
        footprint: memory.Reading = memory.footprint_reading,
    ) -> None:
        self._link = Link(sock)
        self._engine = engine
        self._clock = clock
        self._footprint = footprint
        self._to_tokenize: deque[wire.Tokenize] = deque()
        self._step_s = 0.0
        """Duration of the last step."""
        self._pause_end = -float("inf")
        """Time until which an idle engine is not stepped."""
        self._waits_since: float | None = None
        """Time at which the idle work that is left had to wait first; None: none waits."""
        self._stopping = False
        self._memory_requests = 0
        self._rate = _Rate()
        self._stats_at = -float("inf")
        self._worked = False
        """Whether there was a step since the last `Stats`."""
        self._phase: wire.Phase = "idle"
        """The last reported phase."""
        self._phases = Phases()
        self._gate = TimeSliceGate(on=False)
        self._phase_due = clock() + PHASE_INTERVAL_S
        engine.watch(self._enter, self._send_early)

    def run(self) -> None:
        """Load and serve; return after the daemon sent `Stop` and has read all reports.

        Raises `Orphaned` if the daemon is gone, and any error of a broken engine.
        """
        self._link.put(
            wire.Started(pid=os.getpid(), mlx=_version("mlx"), mlx_lm=_version("mlx-lm"))
        )
        try:
            if self._load():
                self._serve()
        except _Stopped:
            pass
        # Sent before the exit, so that other workers do not wait for it.
        self._send_now(self._gate.work_done(self._clock()))
        self._engine.close()
        self._link.flush()

    # Loading.

    def _load(self) -> bool:
        command = self._link.next_command()
        if isinstance(command, wire.Stop):
            return False
        if not isinstance(command, wire.LoadModel):
            raise LocalProtocolError(f"the first command is {command}, not a load")
        try:
            info = self._engine.load(command, self._report_progress, self._request_grant)
        except KvdError as error:
            self._link.put(wire.LoadFailed(error=error.info()))
            return False
        # Objects created by imports and the load stay alive. Without the freeze, each collection
        # would scan them for 30 ms.
        gc.collect()
        gc.freeze()
        self._gate = TimeSliceGate(on=uses_time_slices(command.time_slices, info.device))
        # Sent before `Ready`, so that the list of segments arrives before the first request.
        for report in self._engine.take_reports():
            self._link.put(report)
        self._link.put(wire.Ready(info=info))
        return True

    def _report_progress(self, stage: str, fraction: float) -> None:
        self._link.put(wire.Progress(stage=stage, fraction=fraction))
        self._link.pump()
        self._raise_if_stopped()

    def _request_grant(self, total_bytes: int, reason: str) -> wire.Grant:
        self._memory_requests += 1
        seq = self._memory_requests
        self._link.put(wire.MemoryRequested(seq=seq, total_bytes=total_bytes, reason=reason))
        while True:
            self._raise_if_stopped()
            for at, command in enumerate(self._link.commands):
                if isinstance(command, wire.Grant) and command.seq == seq:
                    del self._link.commands[at]
                    limit.allow(command.total_bytes)
                    return command
            self._link.wait(None)

    def _raise_if_stopped(self) -> None:
        if any(isinstance(command, wire.Stop) for command in self._link.commands):
            raise _Stopped

    # Serving.

    def _serve(self) -> None:
        self._report_stats()
        while True:
            self._link.pump()
            self._handle_commands()
            self._pass_on(self._engine.take_reports())
            self._tokenize()
            if self._stopping and not self._engine.keeps_worker:
                return
            if not self._has_work:
                if not self._to_tokenize:
                    self._sleep()
            elif self._may_compute():
                self._step()
            elif not (self._to_tokenize or self._link.commands):
                self._await_time_slice()

    def _enter(self, phase: wire.Phase) -> None:
        """Report a phase before it begins: the loop cannot send reports during the phase."""
        now = self._clock()
        self._phases.enter(phase, now)
        if phase != self._phase or now >= self._phase_due:
            self._phase = phase
            self._phase_due = now + PHASE_INTERVAL_S
            self._send_now(wire.PhaseChanged(phase=phase))

    def _step(self) -> None:
        timed = self._gate.is_timed
        if timed:
            self._send_now(self._gate.before_step(self._clock()))
        was_idle, start = self._engine.is_idle, self._clock()
        reports = self._engine.step()
        now = self._clock()
        self._note_pause(now, was_idle=was_idle)
        self._step_s = now - start
        self._phases.leave(now)
        if timed:  # sent before the step's reports, because other workers wait for this one
            self._send_now(self._gate.after_step(self._clock()))
        self._pass_on(reports)
        self._worked = True
        self._report_stats()

    def _pass_on(self, reports: list[wire.Report]) -> None:
        for report in reports:
            self._link.put(report)

    def _send_early(self, reports: list[wire.Report]) -> None:
        """Send reports in the middle of a step."""
        self._pass_on(reports)
        self._link.send()

    def _note_pause(self, now: float, *, was_idle: bool) -> None:
        """Begin a pause if a step ended the last request and left idle work."""
        if not self._engine.is_idle:
            return
        if was_idle or not self._engine.has_work:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since = now
        self._pause_end = min(now + PAUSE_S, self._waits_since + MOST_PAUSES_S)
        # Counters are due now: the governor may reclaim memory that the pause keeps.
        self._stats_at = -float("inf")

    @property
    def _has_work(self) -> bool:
        """Whether the engine has work that may start now. Idle work may not during a pause."""
        is_pause = self._clock() < self._pause_end and self._engine.is_idle
        return self._engine.has_work and not is_pause

    def _may_compute(self) -> bool:
        self._send_now(self._gate.request_slice(prefills=self._engine.reads_prompts))
        return self._gate.is_open

    def _await_time_slice(self) -> None:
        self._link.wait(LONG_WAIT_S)
        if not self._link.commands:
            self._enter("idle")
        self._report_stats()

    def _send_now(self, report: wire.Report | None) -> None:
        if report is not None:
            self._link.put(report)
            self._link.send()

    def _sleep(self) -> None:
        """Sleep until a command arrives or `_has_work`, such as at a deadline or after a pause."""
        self._send_now(self._gate.work_done(self._clock()))
        self._enter("idle")
        while not (self._link.commands or self._has_work):
            due = min(self._stats_due, self._engine.next_deadline or self._stats_due)
            if self._engine.has_work:
                due = min(due, self._pause_end)
            self._link.wait(max(0.0, due - self._clock()))
            self._report_stats()

    def _handle_commands(self) -> None:
        """Handle the commands that were read; many of them at once do not delay the rows."""
        end = self._clock() + max(COMMANDS_S, COMMANDS_SHARE * self._step_s)
        while self._link.commands:
            self._handle(self._link.commands.popleft())
            if self._clock() >= end and self._engine.has_work:
                return

    def _handle(self, command: wire.Command) -> None:  # noqa: C901 - one match over one union
        match command:
            case wire.Submit():
                self._submit(command)
            case wire.Tokenize():
                self._to_tokenize.append(command)
            case wire.CancelRow():
                self._engine.cancel(command.rid)
            case wire.Grant():
                if command.seq:  # else it only informs about the model's limit, and may be late
                    limit.allow(command.total_bytes)
                self._engine.granted(command)
            case wire.Reclaim():
                self._engine.reclaim(command)
            case wire.StartLevel():
                self._engine.start_level(command)
            case wire.SegmentsChanged() | wire.SegmentAllowed():
                self._engine.segment_command(command)
            case wire.TimeSlice():
                self._send_now(self._gate.apply(command, self._clock()))
            case wire.Stop():
                if command.write_s <= 0:
                    raise _Stopped
                self._stopping = True
                self._engine.drain(command.write_s)
            case wire.LoadModel():
                raise LocalProtocolError("a worker loads only one model")

    def _submit(self, request: wire.Submit) -> None:
        if self._stopping:
            self._refuse(request, Draining("the model accepts no requests: it is being unloaded"))
            return
        self._enter("tokenize")
        try:
            prompt_tokens = self._engine.submit(request)
        except KvdError as error:
            self._refuse(request, error)
        except Exception:  # noqa: BLE001 - a tokenizer error on one prompt must not end all rows
            _log.exception("request %s failed in submit", request.rid)
            failure = InternalError("the worker failed to accept the request; see its log")
            self._refuse(request, failure)
        else:
            if prompt_tokens is not None:
                self._link.put(wire.RowAccepted(rid=request.rid, prompt_tokens=prompt_tokens))
        self._phases.leave(self._clock())

    def _tokenize(self) -> None:
        """Tokenize one of the waiting texts, so that at most one text delays the next step."""
        if not self._to_tokenize:
            return
        request = self._to_tokenize.popleft()
        self._enter("tokenize")
        try:
            self._link.put(self._engine.tokenize(request))
        except KvdError as error:
            self._link.put(wire.Tokenized(seq=request.seq, error=error.info()))
        except Exception:  # noqa: BLE001 - a tokenizer error must not end the rows
            _log.exception("tokenizing a text failed")
            failure = InternalError("the tokenizer failed on this text; see the worker's log")
            self._link.put(wire.Tokenized(seq=request.seq, error=failure.info()))
        self._phases.leave(self._clock())

    def _refuse(self, request: wire.Submit, error: KvdError) -> None:
        self._link.put(wire.RowFailed(rid=request.rid, error=error.info()))

    # Counters.

    @property
    def _stats_due(self) -> float:
        return self._stats_at + (STATS_INTERVAL_S if self._worked else IDLE_INTERVAL_S)

    def _report_stats(self) -> None:
        now = self._clock()
        if now >= self._stats_due:
            self._stats_at = now
            self._worked = False
            # Rows would wait for a reading: 4 ms for the embedded model.
            reading = self._footprint
            footprint = reading.latest() if self._engine.has_work else reading.newest()
            stats = self._engine.stats()
            stats = msgspec.structs.replace(
                stats,
                tokens_per_s=self._rate.at(now, stats.generated_tokens),
                phases=self._phases.histograms(),
                memory=msgspec.structs.replace(stats.memory, footprint=footprint),
            )
            self._link.put(wire.Stats(stats=stats))


class _Rate:
    """Tokens per second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def at(self, now: float, total: int) -> float:
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
