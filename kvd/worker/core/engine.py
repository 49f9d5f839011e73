"""The engine: runs a model's requests in pipelined steps, and manages their memory between steps.

One step, in order::

    plan      admit requests; choose what to prefill and what to decode (`scheduling`)
    decode    launch step n+1 from the lazy tokens of step n; wait for step n and read it
    prefill   wait for step n+1; one pass over chunks of one or more prompts
    pools     return memory to the daemon, continue transfers, or grow pools (`core.pace`)

Most steps only plan and decode. The host then processes the tokens of step n while the device
computes step n+1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from msgspec.structs import replace

from kvd.worker.cache import cuda_driver
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.segment_records import prepare_copies
from kvd.worker.core import builder, load_errors
from kvd.worker.core.batch import Batch
from kvd.worker.core.embeddings import Embeddings
from kvd.worker.core.encryption import segment_cipher, swap_format
from kvd.worker.core.freeing import Freeing
from kvd.worker.core.idle_work import IdleWork
from kvd.worker.core.interleaving import Interleaving
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.out_of_memory import OutOfMemory
from kvd.worker.core.pace import Pace
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.prompts import Prompts
from kvd.worker.core.rates import Rates
from kvd.worker.core.reclaiming import Reclaiming
from kvd.worker.core.recovery import Recovery
from kvd.worker.core.refusal import refuse
from kvd.worker.core.segment_reads import SegmentReads
from kvd.worker.core.segment_store import SegmentStore
from kvd.worker.core.staging_memory import StagingMemory
from kvd.worker.core.step_clock import StepClock
from kvd.worker.core.submissions import Submissions
from kvd.worker.core.swap import SwapFolder, Transfers
from kvd.worker.engine import AskGrant, OnPhase, OnReports, ReportProgress, ignore_phase
from kvd.worker.gang.leader import Gang
from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_files import SegmentFiles
from kvd.worker.prefix.segment_index import SegmentIndex
from kvd.worker.prefix.space import space_of
from kvd.worker.process import shortage
from kvd.worker.process.freed_buffers import FreedBuffers
from kvd.worker.scheduling.admission import AdmissionResult
from kvd.worker.scheduling.scheduler import Plan
from kvd.worker.serving import loading
from kvd.worker.text.choices import deadline_exceeded
from protocol.record_format import PLAIN
from protocol.types import ModelInfo, WorkerStats
from protocol.worker import (
    Grant,
    LoadModel,
    MemoryRequested,
    Phase,
    Reclaim,
    Report,
    RowAdmitted,
    SegmentCommand,
    SegmentsOpened,
    StartLevel,
    Submit,
    Tokenize,
    Tokenized,
)

_log = logging.getLogger("kvd.worker")

WAIT_SECONDS = 0.001
"""Seconds that a step waits if all that is left to do is to read from a disk."""


@dataclass
class _PhaseListener:
    """Calls ``on_phase``, which `MLXEngine.watch` may change at any time."""

    on_phase: OnPhase = ignore_phase
    flushed: bool = False
    """Whether this step has written pages before it decoded."""

    def __call__(self, phase: Phase) -> None:
        self.flushed |= phase == "flush"
        self.on_phase(phase)


class MLXEngine:
    """`kvd.worker.engine.Engine` over MLX. ``clock``: seconds, for deadlines.

    ``gang``: the other ranks, if the model is divided among several processes.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, gang: Gang | None = None
    ) -> None:
        self._gang = gang
        self._enter_phase = _PhaseListener()
        self._on_reports: OnReports | None = None
        self._clock = clock
        self._step_clock = StepClock(clock)
        self._rates = Rates()
        self._pace = Pace()
        self._steps = 0
        self._loaded = False
        self._segments: SegmentStore | None = None

    def load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        try:
            return self._load(command, progress, ask_grant)
        except BaseException as error:
            if (typed := load_errors.typed(error, command.source)) is None:
                raise
            raise typed from error

    def _load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        model = builder.load_model(command, progress, ask_grant, self._gang)
        runner, text = model.runner, model.text
        command = loading.with_chunk(command, model.serving.served.runner)
        prefix_cache = builder.make_prefix_cache(command, runner.cache)
        admission, costs = builder.make_admission(command, model, prefix_cache, ask_grant)
        self._runner, self._text, self._prefix_cache = runner, text, prefix_cache
        self._admission, self._scheduler = admission, admission.scheduler
        self._weights_bytes = model.weights_bytes
        self._ranks = command.ranks
        scratch = loading.scratch_bytes(model.loaded, command, model.serving.served.runner)
        self._scratch_bytes = self._ranks * scratch
        swap = SwapFolder.open(command.swap_folder, command.swap_bytes, swap_format(command))
        transfers = Transfers(swap)
        enter, relieve = self._enter_phase, model.compiler.relieve
        batch = Batch(runner, admission, prefix_cache, transfers, text, enter, relieve)
        grammars = model.compiler
        memory = MemoryAccount(runner.cache, admission, prefix_cache, batch.requests, grammars)
        preemption = Preemption(batch, self._rates, self._clock)
        reclaiming = Reclaiming(batch, memory, preemption)
        recovery = Recovery(batch, command.prefill_chunk)
        self._transfers, self._batch, self._memory = transfers, batch, memory
        self._scheduler.must_end_pass = lambda rid, *ends, goes_on: prefix_cache.must_end_pass(
            batch.requests[rid].tracked, *ends, goes_on=goes_on
        )
        self._submissions = Submissions(text, batch, model.embedding_rules, model.compiler)
        embeddings = Embeddings(batch, model.embedding_rules.info)
        interleaving = Interleaving(batch, self._rates, self._deliver)
        freed = FreedBuffers(loading.freed_bytes(command))
        self._prompts = Prompts(batch, memory, self._rates, embeddings, interleaving, freed)
        self._preemption, self._reclaiming = preemption, reclaiming
        self._freeing = Freeing(batch, memory, reclaiming)
        self._out_of_memory = OutOfMemory(batch, recovery, preemption, reclaiming)
        probing = model.serving.probing
        self._idle_work = IdleWork(runner.cache, admission, memory, probing, enter)
        self._loaded = True
        info = loading.info_of(
            command,
            model.loaded,
            model.serving.served,
            model.serving.verdict,
            model.serving.bits,
            native=model.native,
            has_chat_template=text.has_chat_template,
            chat=text.abilities if text.has_chat_template else None,
            costs=costs,
            embedding=model.embedding_rules.info,
        )
        self._segments = self._open_segments(command, model, info)
        return info

    def _open_segments(
        self, command: LoadModel, model: builder.Model, info: ModelInfo
    ) -> SegmentStore | None:
        """Return this engine's part of the prefix store, and report its space."""
        folder, tree, cache = command.segments_folder, self._prefix_cache.tree, self._runner.cache
        if folder is None or model.fingerprint is None or tree is None:
            return None
        if not isinstance(cache, ModelCache):
            return None
        try:
            cipher = segment_cipher(command)
        except OSError as error:
            _log.warning("prefixes are neither stored nor read: %s", error)
            return None
        space = space_of(model.fingerprint, cache, info, command)
        secret = b"" if cipher is None else cipher.derive(b"segment keys")
        self._batch.reports.append(SegmentsOpened(space=space))
        index = SegmentIndex(space, command.prefill_chunk, secret)
        staging = StagingMemory(
            self._admission,
            self._memory,
            loading.staging_bytes(cache),
            self._request_memory,
            charged=command.prefix_store_on,
        )
        if command.prefix_store_on:
            prepare_copies(cache)
        records = RecordMemory(loading.record_memory_bytes(cache), cuda_driver.lock)
        files = SegmentFiles(Path(folder), space, cipher or PLAIN, records, self._clock)
        self._prompts.segments = SegmentReads(
            self._batch,
            self._memory,
            self._preemption,
            self._rates,
            index,
            files,
            staging,
            self._step_clock,
        )
        return SegmentStore(self._batch, self._rates, index, files, staging, self._clock)

    # Requests.

    def submit(self, request: Submit) -> int | None:
        self._prompts.gathering.note_request()
        return self._submissions.submit(request, self._clock())

    def tokenize(self, request: Tokenize) -> Tokenized:
        return self._text.tokenize(request)

    def cancel(self, rid: str) -> None:
        if not self._submissions.cancel(rid):
            self._batch.finish(rid, "cancelled")

    def granted(self, grant: Grant) -> None:
        self._admission.granted(grant)
        if self._segments is not None:
            self._segments.staging.charge()

    def reclaim(self, command: Reclaim) -> None:
        self._reclaiming.add(command)

    def start_level(self, command: StartLevel) -> None:
        self._admission.set_start_level(command.level)

    def segment_command(self, command: SegmentCommand) -> None:
        if self._segments is not None:
            self._segments.handle(command)

    def drain(self, seconds: float) -> None:
        if self._segments is not None:
            self._segments.drain(seconds)

    @property
    def keeps_worker(self) -> bool:
        return self._segments is not None and self._segments.keeps_worker

    def watch(self, on_phase: OnPhase, on_reports: OnReports | None = None) -> None:
        self._enter_phase.on_phase = on_phase
        self._on_reports = on_reports

    def _deliver(self) -> None:
        """Send the reports that exist, so that tokens do not wait for the rest of the step."""
        if self._on_reports is not None and self._batch.reports:
            self._on_reports(self.take_reports())

    @property
    def has_work(self) -> bool:
        if self._is_busy or self._admission.has_work:
            return True
        if self._segments is not None and self._segments.has_work:
            return True
        deadline = self._scheduler.next_deadline
        is_idle = self._idle_work.is_left and not self._batch.requests
        return is_idle or (deadline is not None and deadline <= self._clock())

    @property
    def is_idle(self) -> bool:
        return not (self._is_busy or self._batch.requests)

    @property
    def _is_busy(self) -> bool:
        batch, transfers = self._batch, self._reclaiming.active or self._preemption.busy
        return bool(batch.reports or batch.in_flight or transfers or self._submissions.waiting)

    @property
    def reads_prompts(self) -> bool:
        return self._scheduler.prefilling > 0 or self._admission.may_admit

    @property
    def next_deadline(self) -> float | None:
        store = None if self._segments is None else self._segments.next_deadline
        both = (self._scheduler.next_deadline, store)
        return min((one for one in both if one is not None), default=None)

    # The step.

    def step(self) -> list[Report]:
        """Run one step; return its reports.

        If the step runs out of memory, its rows are rebuilt, and clients see only the delay. After
        repeated failures, requests are failed, one at a time.
        """
        with self._step_clock:
            short = shortage.attempt(self._work)
        if short is None:
            self._out_of_memory.step_succeeded()
        elif self._gang is not None:
            raise short  # other ranks may have finished the step: no rank can repeat it alone
        else:
            self._enter_phase("pools")
            self._out_of_memory.step_failed(short)
        self._steps += 1
        return self.take_reports()

    def take_reports(self) -> list[Report]:
        reports, self._batch.reports = self._batch.reports, []
        return reports

    def _work(self) -> None:
        was_idle = self.is_idle
        self._submissions.work(self._clock())
        for rid in self._scheduler.expired(self._clock()):
            request = self._batch.requests[rid]
            self._batch.fail(request, deadline_exceeded(request.generated))
        plan = self._plan()
        group = self._prompts.prepare(plan, tokenizing=self._submissions.tokenizing)
        decode = [rid for rid in plan.decode if rid not in self._transfers.reading]
        decode = self._batch.read_before_flush(decode, self._deliver)
        start, self._enter_phase.flushed = time.monotonic(), False
        self._prompts.begin_single_tokens(decode)
        if self._batch.decode(decode):
            seconds = time.monotonic() - start
            self._rates.note("decode", 1, seconds)
            if not (group or self._enter_phase.flushed):
                self._pace.note_usual(seconds)
        if group:
            self._enter_phase("prefill")
            self._deliver()
            self._prompts.prefill_next(decode)
        self._work_on_pools(decode, waits=not (decode or group))
        if self._segments is not None:
            self._segments.note_idle(idle=not self._batch.requests)
        if not (self._batch.requests or self._reclaiming.active):
            self._deliver()
            self._request_memory(self._idle_work.run(was_idle=was_idle))
        elif self._preemption.busy and not (decode or group or self._preemption.ready):
            self._preemption.wait(WAIT_SECONDS)
        if not (decode or group or self._batch.in_flight):
            self._submissions.wait()
            self._prompts.gathering.pause()

    def _work_on_pools(self, decode: Sequence[str], *, waits: bool) -> None:
        """Return memory, grow pools, continue transfers or write segments: the first that is due.

        The tokens of the step are sent before this work, which delays those of the next step.
        ``decode``: the requests that decode. ``waits``: whether the step does nothing else.
        """
        seconds = self._pace.seconds(decodes=bool(decode))
        if self._reclaiming.active:
            self._enter_pools()
            self._reclaiming.advance()
        elif self._runner.cache.lacks_room():  # before transfers: the next flush would wait
            self._enter_pools()
            self._runner.cache.make_room(seconds, time.monotonic)
        else:
            self._continue_transfers(seconds, decode, waits)

    def _continue_transfers(self, seconds: float, decode: Sequence[str], waits: bool) -> None:
        """Continue transfers or write segments, unless the next step writes pages."""
        reads, store = self._preemption.ready, self._segments
        if not (reads or (store is not None and store.has_work)):
            return
        if self._batch.must_flush(decode):
            return
        if reads:
            self._enter_phase("pools")
            self._deliver()
            self._preemption.work(seconds, delays_rows=bool(decode), waits=waits)
        elif store is not None:
            self._enter_pools()
            store.work(seconds)

    def _enter_pools(self) -> None:
        self._enter_phase("pools")
        self._deliver()
        self._batch.synchronize()

    def _plan(self) -> Plan:
        result = self._admit()
        if self._freeing.cut_pools(result.plan):
            result = self._admit()
        if result.evict_pages and self._freeing.evict(result.evict_pages):
            result = self._admit()
        if result.stalled is not None:
            self._preemption.make_room(result.stalled, result.plan.missing_pages)
        self._request_spare_memory()
        return result.plan

    def _admit(self) -> AdmissionResult:
        result = self._admission.admit(self._memory.held())
        self._memory.held()  # lowers the pools' limit: newly admitted requests need tails
        self._request_memory(result.memory_request)
        self._batch.reports += result.queue_positions
        if result.refused is not None:
            rid, error = result.refused
            refuse(self._batch, self._batch.requests[rid], error)
        for rid in result.plan.admitted:
            self._batch.set_level(self._batch.requests[rid], self._scheduler.find(rid).level)
            if rid not in result.plan.resumed:
                self._batch.reports.append(RowAdmitted(rid=rid))
        for rid in result.plan.resumed:
            self._enter_phase("pools")
            self._preemption.resume(self._batch.requests[rid])
        if result.swap_out_kept:
            self._preemption.move_out_kept()
        return result

    # Memory.

    def _request_memory(self, request: MemoryRequested | None) -> None:
        if request is not None:
            reclaimable = self._memory.reclaimable()
            self._batch.reports.append(replace(request, reclaimable=reclaimable))

    def _request_spare_memory(self) -> None:
        """Request memory ahead of need, unless requests wait or start below level 0."""
        if self._scheduler.start_level or self._scheduler.waiting or self._scheduler.states.stalled:
            return
        if self._segments is not None and self._batch.requests:
            self._segments.staging.request()
        self._request_memory(self._memory.request_spare())

    def stats(self) -> WorkerStats:
        cache, batch = self._runner.cache, self._batch
        usage = cache.usage
        return WorkerStats(
            step=self._steps,
            rows_running=self._scheduler.decoding,
            rows_prefilling=self._scheduler.prefilling,
            rows_waiting=self._scheduler.waiting,
            max_rows_in_step=batch.max_rows,
            pages_used=usage.pages_used - usage.pages_idle,
            pages_total=usage.pages_total,
            flushes=usage.flushes,
            kernel_launches=self._runner.launches,
            prompt_tokens=self._submissions.prompt_tokens,
            computed_tokens=self._prompts.computed_tokens,
            generated_tokens=batch.generated_tokens,
            prefix=self._prefix_cache.usage,
            reclaimable=self._memory.reclaimable(),
            memory=loading.memory_use(
                cache, weights=self._weights_bytes, scratch=self._scratch_bytes, ranks=self._ranks
            ),
        )

    def close(self) -> None:
        """Wait for the device and delete swap files; the process's exit frees everything else."""
        if self._loaded:
            self._batch.synchronize()
            self._transfers.folder.clear()
        mx.synchronize()
