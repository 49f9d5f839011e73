"""The engine: requests become rows, rows run in a pipelined loop, tokens become reports.

One step, in order::

    plan      who joins, whose chunk is next, who decodes           integers (`scheduler`)
    launch    the decode step n+1, from the tokens of step n        lazy, nothing waits
    collect   the tokens of step n                                  the only wait for the device
    prefill   one chunk of one prompt, then a flush                 drained

So the host's work on step n's tokens overlaps with the device's on step n+1. A row that ends in
step n already runs in n+1; its place is freed only when that one has been collected.

Does not cover: sockets (`loop`), what is drawn (`sampler`), text (`text`), memory decisions.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from kvd.worker import describe, memory, model, probe, sampler, verdicts
from kvd.worker.admission import Admission, Held
from kvd.worker.budget import PageBudget, mebibytes
from kvd.worker.cache.composite import CacheSettings, ModelCache
from kvd.worker.cache.lowering import Lowering
from kvd.worker.cache.scheme import floors_of, ladder_of
from kvd.worker.cache.store import SLAB_PAGES
from kvd.worker.engine import AskGrant, ReportProgress
from kvd.worker.runner import Row, Runner
from kvd.worker.sampler import BatchSampling
from kvd.worker.scheduler import Chunk, Plan, Scheduler
from kvd.worker.text import Text, TextStream
from protocol.errors import ContextTooLong, InsufficientMemory, KvdError, NumericalError
from protocol.messages import FinishReason
from protocol.types import MemoryUse, ModelInfo, Usage, WorkerStats
from protocol.worker import (
    Grant,
    LoadModel,
    Report,
    RowFailed,
    RowFinished,
    RowTokens,
    Submit,
)

DEFAULT_MAX_TOKENS = 512
ALLOCATOR_CACHE = 128 * 1024 * 1024
"""Bytes that MLX may keep for reuse; counted in the worker's base."""
POOL_SECONDS = 0.010
"""How long a step works on pages that go down the ladder, or on pools that grow."""
FIRST_ROWS = 4
"""Rows whose tails the first grant covers."""


@dataclass(eq=False)
class _Request:
    rid: str
    submit: Submit
    prompt: list[int]
    max_new: int
    stream: TextStream
    row: Row | None = None
    launched: int = 0
    """Tokens whose steps have been launched."""
    sent: int = 0
    trusted: bool = False
    """Whether the newest logits were sound, and so all that they attended to."""
    ended: bool = False


@dataclass(eq=False)
class _Flight:
    """A decode step that has been launched: what to read, and whose it is."""

    requests: list[_Request]
    tokens: mx.array
    """``[rows]`` int32."""
    trusted: mx.array
    """``[rows]`` bool."""
    sampling: BatchSampling
    where: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.where = {request.rid: index for index, request in enumerate(self.requests)}


class MLXEngine:
    """`kvd.worker.engine.Engine` over MLX."""

    _runner: Runner
    _text: Text
    _scheduler: Scheduler
    _admission: Admission

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._reports: list[Report] = []
        self._flight: _Flight | None = None
        self._steps = 0
        self._most_rows = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._weights_bytes = 0
        self._scratch_bytes = 0
        self._lowerings: deque[Lowering] = deque()

    # Loading.

    def load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        """Find, check, load and prove the model; weights and pages are granted before."""
        from kvd.worker import seam  # noqa: PLC0415 - before any model module is imported

        seam.install()
        mx.set_cache_limit(ALLOCATOR_CACHE)
        path = model.resolve(command.source, progress)
        headers = model.inspect(path)
        base = memory.footprint() + headers.weights_bytes + ALLOCATOR_CACHE
        progress("waiting for memory", 0.05)
        grant = _demand(ask_grant, base, "weights and scratch")
        progress("weights", 0.1)
        loaded = model.load(path, lambda stage, part: progress(stage, 0.1 + 0.7 * part))
        self._weights_bytes = mx.get_active_memory()
        progress("checking attention", 0.8)
        verdict = verdicts.find(headers)
        served = probe.serve(loaded.model, _settings(command, verdict), loaded.vocab_size)
        self._runner = served.runner
        self._runner.compile()
        mx.clear_cache()
        cache = self._runner.cache
        self._scratch_bytes = command.attention_scratch
        base += self._weights_bytes - headers.weights_bytes + self._scratch_bytes
        unit = cache.unit_bytes
        row_pages = -(-cache.row_bytes // unit)
        first = SLAB_PAGES + FIRST_ROWS * row_pages
        grant = _demand(ask_grant, base + first * unit, "first pages")
        self._scheduler = Scheduler(
            max_rows=command.max_rows,
            chunk=command.prefill_chunk,
            pages_for=lambda length: (
                -(-cache.pages_bytes_for(length, command.prefill_chunk) // unit)
            ),
        )
        self._admission = Admission(
            self._scheduler,
            PageBudget(base, unit, grant.total_bytes, grant.seq),
            row_pages=row_pages,
            rest_pages=first,
        )
        self._text = Text(
            loaded.tokenizer, vocab_size=loaded.vocab_size, context_length=loaded.context_length
        )
        return self._info(loaded, served, verdict)

    def _info(
        self, loaded: model.LoadedModel, served: probe.Served, verdict: verdicts.Verdict | None
    ) -> ModelInfo:
        cache = self._runner.cache
        parts = describe.parts(served)
        growing = sum(part.bytes_per_token for part in parts)
        return ModelInfo(
            architecture=str(loaded.config["model_type"]),
            parameters=loaded.parameters,
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            layers=len(loaded.model.layers),
            dtype=describe.dtype_name(loaded.model),
            kv_scheme=cache.scheme.name,
            kv_layout=describe.layout(cache),
            page_bytes=64 * growing,
            kv_bytes_per_token=growing,
            attention_path=served.path + (", compiled steps" if self._runner.compiled else ""),
            attention_error=served.error,
            kv=parts,
            kv_ladder=describe.ladder(cache),
            kv_calibrated=None if verdict is None else verdict.lowest,
            has_chat_template=self._text.has_chat_template,
            device=_device(),
            blas=os.environ.get("KVD_BLAS_PRELOADED"),
        )

    # Requests.

    def submit(self, request: Submit) -> int:
        """Queue a request; raises the `KvdError` that its prompt or limits ask for."""
        prompt = self._text.encode(request)
        room = self._text.context_length - len(prompt)
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextTooLong(
                f"prompt and completion take {len(prompt)} + {request.max_tokens} tokens, the"
                f" model's context is {self._text.context_length}: max_tokens can be {room}",
                prompt_tokens=len(prompt),
                max_tokens=request.max_tokens,
                context_length=self._text.context_length,
            )
        max_new = request.max_tokens or min(room, DEFAULT_MAX_TOKENS)
        stream = self._text.stream(request, prompt)
        self._admission.submit(request.rid, len(prompt), max_new)
        self._requests[request.rid] = _Request(request.rid, request, prompt, max_new, stream)
        self._prompt_tokens += len(prompt)
        return len(prompt)

    def cancel(self, rid: str) -> None:
        """End a row now; its place is free when no step in flight reads it."""
        request = self._requests.get(rid)
        if request is not None and not request.ended:
            self._finish(request, "cancelled")

    def step_down(self, level: int, rids: Collection[str] | None = None) -> None:
        """Lower these requests, or all, to a level of the ladder (0 is its top) while they run.

        Every step works on it for `POOL_SECONDS`; what they seal from now on is of that level.
        Models that are served dense stay as they are.
        """
        cache = self._runner.cache
        if isinstance(cache, ModelCache):
            rows = [
                request.row
                for request in self._requests.values()
                if request.row is not None and (rids is None or request.rid in rids)
            ]
            self._lowerings.append(Lowering(cache, rows, level))

    def granted(self, grant: Grant) -> None:
        """Take the answer to a `GrantWanted`."""
        self._admission.granted(grant)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now."""
        return bool(self._reports or self._flight or self._admission.has_work)

    # The step.

    def step(self) -> list[Report]:
        """Launch step n+1, read step n, prefill one chunk."""
        plan = self._plan()
        landed, self._flight = self._flight, self._launch(plan.decode)
        if landed is not None:
            self._collect(landed)
        if plan.prefill is not None:
            self._prefill(plan.prefill)
        if self._lowerings:
            self._lower()
        elif self._runner.cache.lacks_room:
            self._drain()
            self._runner.cache.make_room(POOL_SECONDS, time.monotonic)
        if not self._requests:
            self._rest()
        self._steps += 1
        reports, self._reports = self._reports, []
        return reports

    def _plan(self) -> Plan:
        plan = self._take_turn()
        if plan.wanted_pages and self._give_up_spare():
            plan = self._take_turn()
        return plan

    def _take_turn(self) -> Plan:
        turn = self._admission.turn(self._held())
        for rid in turn.plan.admitted:
            self._requests[rid].row = self._runner.cache.new_row()
        if turn.wish is not None:
            self._reports.append(turn.wish)
        if turn.refused is not None:
            rid, error = turn.refused
            self._fail(self._requests[rid], error)
        return turn.plan

    def _launch(self, rids: tuple[str, ...]) -> _Flight | None:
        requests = [self._requests[rid] for rid in rids]
        requests = [one for one in requests if not one.ended and one.launched < one.max_new]
        if not requests:
            return None
        cache = self._runner.cache
        rows = [_row(request) for request in requests]
        if cache.needs_flush(rows):
            self._flush()
        logits = self._runner.decode(rows, self._inputs(requests))
        sampling = self._sampling(requests)
        tokens = sampler.sample(logits, sampling, [row.length for row in rows])
        flight = _Flight(requests, tokens, sampler.finite_and_varied(logits), sampling)
        mx.async_eval(flight.tokens, flight.trusted, cache.arrays())  # type: ignore[no-untyped-call]
        for request in requests:
            request.launched += 1
        self._most_rows = max(self._most_rows, len(rows))
        return flight

    def _inputs(self, requests: list[_Request]) -> mx.array:
        """Return the rows' input tokens: those of the step in flight, or a prompt's last."""
        flight = self._flight
        last = mx.array([request.prompt[-1] for request in requests], mx.int32)
        if flight is None:
            return last
        if requests == flight.requests:
            return flight.tokens
        size = len(flight.requests)
        index = [
            flight.where.get(request.rid, size + position)
            for position, request in enumerate(requests)
        ]
        return mx.concatenate([flight.tokens, last])[mx.array(index)]

    def _sampling(self, requests: list[_Request]) -> BatchSampling:
        if self._flight is not None and requests == self._flight.requests:
            return self._flight.sampling
        return BatchSampling.of([request.submit.sampling for request in requests])

    def _collect(self, landed: _Flight) -> None:
        tokens: Any = landed.tokens.tolist()
        trusted: Any = landed.trusted.tolist()
        for request, token, good in zip(landed.requests, tokens, trusted, strict=True):
            request.trusted = good
            if request.ended:
                self._release(request)
            elif good:
                self._deliver(request, token)
            else:
                self._fail(
                    request,
                    NumericalError("the model's output for this request is not finite or constant"),
                )

    def _deliver(self, request: _Request, token: int) -> None:
        text = request.stream.push(token)
        shown = [] if token in self._text.eos_ids else [token]
        index = request.sent
        request.sent += 1
        self._generated_tokens += 1
        over = request.stream.stopped or request.sent == request.max_new
        if over and not request.stream.stopped:
            text += request.stream.finish()
        if shown or text:
            self._reports.append(RowTokens(rid=request.rid, index=index, tokens=shown, text=text))
        if over:
            self._finish(request, "stop" if request.stream.stopped else "length")

    def _finish(self, request: _Request, reason: FinishReason) -> None:
        usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=request.sent)
        self._reports.append(RowFinished(rid=request.rid, reason=reason, usage=usage))
        self._end(request)

    def _fail(self, request: _Request, error: KvdError) -> None:
        self._reports.append(RowFailed(rid=request.rid, error=error.info()))
        self._end(request)

    def _end(self, request: _Request) -> None:
        request.ended = True
        if self._flight is None or request.rid not in self._flight.where:
            self._release(request)

    def _release(self, request: _Request) -> None:
        self._admission.finish(request.rid)
        del self._requests[request.rid]
        if request.row is not None:
            self._runner.cache.free(request.row, clean=request.trusted)

    def _prefill(self, chunk: Chunk) -> None:
        request = self._requests[chunk.rid]
        self._drain()
        self._runner.prefill(_row(request), request.prompt[chunk.start : chunk.end])
        self._scheduler.prefilled(chunk.rid, chunk.end)

    def _lower(self) -> None:
        self._drain()
        lowering = self._lowerings[0]
        lowering.advance(POOL_SECONDS, time.monotonic)
        if lowering.over:
            self._lowerings.popleft()

    def _flush(self) -> None:
        self._drain()
        self._runner.cache.flush()

    def _drain(self) -> None:
        if self._flight is not None:
            mx.eval(self._flight.tokens, self._flight.trusted, self._runner.cache.arrays())

    # Memory.

    def _held(self) -> Held:
        cache, budget = self._runner.cache, self._admission.budget
        cache.limit_bytes = budget.pages * budget.page_bytes
        return Held(self._charged_pages, cache.tail_slots)

    @property
    def _charged_pages(self) -> int:
        """What the pools take, in the budget's pages."""
        charged: int = self._runner.cache.charged_bytes
        return -(-charged // self._admission.budget.page_bytes)

    def _give_up_spare(self) -> bool:
        """Cut pools down to what rows have reserved; return whether that freed anything."""
        if self._lowerings or self._charged_pages <= self._scheduler.reserved:
            return False  # a step-down cuts the pools itself, when it is over
        self._flush()
        freed: int = self._runner.cache.compact(self._scheduler.reserved)
        return freed > 0

    def _rest(self) -> None:
        """Give memory back when nobody is there: one slab stays for the next request."""
        self._lowerings.clear()
        cache = self._runner.cache
        if self._charged_pages > SLAB_PAGES or cache.tail_slots > FIRST_ROWS:
            cache.shrink(SLAB_PAGES)
            mx.clear_cache()
        wish = self._admission.rest()
        if wish is not None:
            self._reports.append(wish)

    def stats(self) -> WorkerStats:
        """Return the counters."""
        cache = self._runner.cache
        return WorkerStats(
            step=self._steps,
            rows_running=self._scheduler.decoding,
            rows_prefilling=self._scheduler.prefilling,
            rows_waiting=self._scheduler.waiting,
            max_rows_in_step=self._most_rows,
            pages_used=cache.pages_used,
            pages_total=cache.pages_total,
            flushes=cache.flushes,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            memory=MemoryUse(
                weights=self._weights_bytes,
                kv_pages=cache.pages_bytes,
                kv_pages_used=cache.used_bytes,
                kv_tails=cache.tails_bytes,
                scratch=self._scratch_bytes,
                active=mx.get_active_memory(),
                cache=mx.get_cache_memory(),
            ),
        )

    def close(self) -> None:
        """Wait for the device; the process's exit does the rest."""
        self._drain()
        mx.synchronize()


def _settings(command: LoadModel, verdict: verdicts.Verdict | None) -> CacheSettings:
    kv = command.kv
    return CacheSettings(
        ladder=tuple(verdicts.lift(ladder_of(kv), verdict)),
        floors=lambda layers: floors_of(kv, layers),
        quantized_start=kv.quantized_kv_start,
        max_size=kv.max_kv_size,
        keep=kv.keep if kv.max_kv_size else 0,
        scratch=command.attention_scratch,
    )


def _row(request: _Request) -> Row:
    assert request.row is not None, "the scheduler decodes and prefills admitted rows only"
    return request.row


def _demand(ask_grant: AskGrant, total_bytes: int, reason: str) -> Grant:
    grant = ask_grant(total_bytes, reason)
    if not grant.granted:
        raise InsufficientMemory(
            f"the model needs {mebibytes(total_bytes)} ({reason}); of the budget of"
            f" {mebibytes(grant.budget_bytes)} only {mebibytes(grant.available_bytes)} are free:"
            " unload a model or raise the budget",
            needed_bytes=total_bytes,
            budget_bytes=grant.budget_bytes,
            available_bytes=grant.available_bytes,
        )
    return grant


def _device() -> str:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))
