"""The engine: requests become rows, rows run in a pipelined loop, tokens become reports.

One step, in order::

    plan      who joins, whose chunk is next, who decodes           integers (`scheduler`)
    launch    the decode step n+1, from the tokens of step n        lazy, nothing waits
    collect   the tokens of step n                                  the only wait for the device
    prefill   one chunk of a prompt, or of several; then a flush    drained
    pools     memory that goes back to the daemon, pools that grow  drained, a time slice

So the host's work on step n's tokens overlaps with the device's on step n+1. A row that ends in
step n already runs in n+1; its place is freed only when that one has been collected.

Does not cover: sockets (`loop`), what is drawn (`sampler`), text (`text`), memory decisions
(`admission`), what the governor asks for (`reclaiming`), what is remembered of prompts
(`cache.prefix`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from msgspec.structs import replace

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.page_store import SLAB_PAGES
from kvd.worker.core import replay
from kvd.worker.core.hands import Hands
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.out_of_memory import OutOfMemory
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.prompts import Prompts
from kvd.worker.core.rates import Rates
from kvd.worker.core.reclaiming import Reclaiming
from kvd.worker.core.recovery import Recovery
from kvd.worker.core.request import Completion, Key, Request
from kvd.worker.core.swap import Folder
from kvd.worker.engine import AskGrant, OnPhase, ReportProgress, ignore_phase
from kvd.worker.native import activation
from kvd.worker.prefix.cache import PrefixCache, next_chunks
from kvd.worker.prefix.tree import PrefixTree
from kvd.worker.process import shortage
from kvd.worker.sampling.sampler import SampledToken, Sampler, SamplerOutput
from kvd.worker.scheduling.admission import Admission, AdmissionResult
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.scheduler import Plan, ReservationSizes, Scheduler
from kvd.worker.serving import calibration, loading, model_files
from kvd.worker.serving.costs import costs_of
from kvd.worker.serving.runner import Row, Runner
from kvd.worker.text.choices import Choices, deadline_exceeded
from kvd.worker.text.text import Text
from protocol.costs import Costs
from protocol.errors import (
    ContextTooLong,
    InsufficientMemory,
    KvdError,
    NumericalError,
)
from protocol.messages import FinishReason
from protocol.types import MemoryUse, ModelInfo, WorkerStats
from protocol.worker import (
    Grant,
    LoadModel,
    MemoryRequested,
    Reclaim,
    Report,
    RowAdmitted,
    RowFailed,
    RowTokens,
    StartLevel,
    Submit,
    Tokenize,
    Tokenized,
)

DEFAULT_MAX_TOKENS = 512
POOL_SECONDS = 0.010
"""How long a step works on pools that grow."""
FIRST_ROWS = 4
"""Rows whose tails the first grant covers."""


@dataclass(frozen=True, eq=False)
class _Flight:
    """A decode step that has been launched: whose it is, and what to read."""

    completions: list[Completion]
    """Those that draw."""
    replayed: list[Completion]
    """Those whose next token is known."""
    draw: SamplerOutput | None
    where: dict[Key, int]
    arrays: list[mx.array]
    """What is to be evaluated, beside the cache."""

    def has(self, completion: Completion) -> bool:
        return completion.key in self.where or completion in self.replayed


class MLXEngine:
    """`kvd.worker.engine.Engine` over MLX."""

    _runner: Runner
    _text: Text
    _sampler: Sampler
    _scheduler: Scheduler
    _admission: Admission
    _prompts: Prompts
    _memory: MemoryAccount
    _preemption: Preemption
    _reclaiming: Reclaiming
    _out_of_memory: OutOfMemory
    _vocabulary: int

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_phase: OnPhase = ignore_phase
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._reports: list[Report] = []
        self._flight: _Flight | None = None
        self._folder: Folder | None = None
        self._rates = Rates()
        self._steps = 0
        self._most_rows = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._weights_bytes = 0
        self._scratch_bytes = 0

    # Loading.

    def load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        """Find, check, load and prove the model; weights and pages are granted before."""
        try:
            return self._load(command, progress, ask_grant)
        except (RuntimeError, MemoryError) as error:
            if (short := shortage.shortage_of(error)) is None:
                raise
            raise InsufficientMemory(
                f"the device ran out of memory while the model was loaded ({short.reason}); end"
                " what else uses it, or lower the budget to what it has",
            ) from error

    def _load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        from kvd.worker.serving import seam  # noqa: PLC0415 - before any model module is imported

        seam.install()
        shortage.install_retries()
        native = activation.activate(progress)
        mx.set_cache_limit(loading.freed_bytes())
        path = model_files.resolve(command.source, progress)
        headers = model_files.inspect(path)
        progress("waiting for memory", 0.05)
        needed = loading.load_bytes(headers, command, packed=native.library is not None)
        loading.require_grant(ask_grant, needed, "weights and scratch")
        progress("weights", 0.1)
        loaded = model_files.load(
            path, lambda stage, part: progress(stage, 0.1 + 0.7 * part), native.library
        )
        loaded = loading.bounded(loaded, command.max_context)
        self._weights_bytes = mx.get_active_memory()
        progress("checking attention", 0.8)
        verdict = calibration.find(headers)
        settings = loading.settings_of(command, verdict)
        served = loading.serve(loaded, settings, native.library, progress)
        self._runner = served.runner
        self._runner.compile()
        self._runner.group()
        self._scratch_bytes = loading.scratch_bytes(loaded, command, self._runner)
        self._text = Text(
            loaded.tokenizer, vocab_size=loaded.vocab_size, context_length=loaded.context_length
        )
        self._vocabulary = loaded.vocab_size
        self._sampler = Sampler(loaded.vocab_size)
        base = loading.base_bytes(loaded, command, self._runner)
        costs = self._begin(command, loaded.weights_bytes, base, ask_grant)
        return loading.info_of(
            command,
            loaded,
            served,
            verdict,
            native=native.status or ("on" if loaded.own_products else None),
            has_chat_template=self._text.has_chat_template,
            costs=costs,
        )

    def _begin(
        self, command: LoadModel, weights: int, base: int, ask_grant: AskGrant
    ) -> Costs | None:
        cache = self._runner.cache
        costs = cache.costs
        unit = costs.unit_bytes
        kv, row_bytes = command.kv, cache.row_bytes
        self._prefix_cache = PrefixCache(None)
        if isinstance(cache, ModelCache) and kv.prefix_cache:
            tree = PrefixTree(
                cache.snapshots, command.prefill_chunk, kv.prefix_every, kv.prefix_cache
            )
            self._prefix_cache = PrefixCache(tree, costs.checkpoint_bytes, costs.checkpoint_charge)
            row_bytes += costs.checkpoint_bytes  # for the first checkpoint that a row leaves
        row_pages = -(-row_bytes // unit)
        first = SLAB_PAGES + FIRST_ROWS * row_pages
        grant = loading.require_grant(ask_grant, base + first * unit, "first pages")
        chunk = command.prefill_chunk
        sizes = ReservationSizes(
            lambda end, level: -(-costs.pages_bytes(end, chunk, level) // unit),
            lambda start, end, level: -(-costs.continued_bytes(start, end, chunk, level) // unit),
            cache.levels,
        )
        self._scheduler = Scheduler(
            max_rows=command.max_rows,
            chunk=chunk,
            group=self._runner.groups,
            sizes=sizes,
        )
        self._admission = Admission(
            self._scheduler,
            PageBudget(base, unit, grant.total_bytes, grant.seq, budget_bytes=grant.budget_bytes),
            row_pages=row_pages,
            idle_pages=first,
        )
        self._memory = MemoryAccount(cache, self._admission, self._prefix_cache, self._requests)
        self._prompts = Prompts(
            self._runner, self._prefix_cache, self._text, self._memory.spare_bytes
        )
        hands = Hands(
            cache,
            self._admission,
            self._prefix_cache,
            self._memory,
            self._requests,
            settle=self._settle,
            drain=self._drain,
            leave=self._leave,
            join=self._join,
        )
        self._folder = Folder.open(command.swap_folder, command.swap_bytes)
        self._preemption = Preemption(hands, self._folder, self._rates, self._report)
        self._reclaiming = Reclaiming(hands, self._preemption, time.monotonic)
        recovery = Recovery(
            self._runner,
            self._scheduler,
            self._prefix_cache,
            command.prefill_chunk,
            lambda phase: self._on_phase(phase),  # noqa: PLW0108 - `watch` may change it
        )
        self._out_of_memory = OutOfMemory(
            hands,
            recovery,
            self._preemption,
            self._reclaiming,
            forget=self._forget_flight,
            redraw=self._redraw,
            release=self._release,
            fail=self._fail,
        )
        return costs_of(cache, weights=weights, base=base, row=row_bytes, first=first, step=chunk)

    # Requests.

    def submit(self, request: Submit) -> int:
        """Queue a request; raises the `KvdError` that its prompt or limits ask for."""
        replay.check_resume(request, self._vocabulary)
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
        completions = [
            Completion((request.rid, choice), self._text.stream(request, prompt))
            for choice in range(request.n)
        ]
        tracked = self._prefix_cache.track(
            request.rid,
            prompt,
            request.prefix_salt or "",
            full_prefill=request.prompt_logprobs is not None,
        )
        over = Choices(request, len(prompt))
        accepted = Request(request, prompt, max_new, completions, over, tracked)
        news = replay.take_up(accepted) if request.resume else []
        if not accepted.completions:
            self._reports += news
            return len(prompt)
        self._admission.submit(
            request.rid,
            len(prompt),
            max_new,
            priority=request.priority,
            deadline=None if request.deadline_s is None else self._clock() + request.deadline_s,
            choices=len(accepted.completions),
            path=() if tracked.full_prefill else tracked.path,
        )
        self._reports += news
        self._requests[request.rid] = accepted
        self._prefix_cache.enqueue(tracked)
        self._prompt_tokens += len(prompt)
        return len(prompt)

    def tokenize(self, request: Tokenize) -> Tokenized:
        """Return the tokens of a text."""
        return self._text.tokenize(request)

    def cancel(self, rid: str) -> None:
        """End a row now; its place is free when no step in flight reads it."""
        request = self._requests.get(rid)
        if request is not None:
            for completion in request.live:
                self._finish(request, completion, "cancelled")

    def granted(self, grant: Grant) -> None:
        """Take the answer to a `MemoryRequested`."""
        self._admission.granted(grant)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now."""
        busy = self._reclaiming.active or self._preemption.busy
        if self._reports or self._flight or busy or self._admission.has_work:
            return True
        due = self._scheduler.next_deadline
        return due is not None and due <= self._clock()

    @property
    def reads_prompts(self) -> bool:
        """Whether steps read prompts now, and may take long for it."""
        return self._scheduler.prefilling > 0 or self._admission.may_admit

    @property
    def next_deadline(self) -> float | None:
        """When a step has something to do even if nothing happens, on the engine's clock."""
        return self._scheduler.next_deadline

    def watch(self, on_phase: OnPhase) -> None:
        """Call this before each phase of a step from now on."""
        self._on_phase = on_phase

    # What the governor asks of running requests.

    def reclaim(self, command: Reclaim) -> None:
        """Give memory back by one means, a slice in each step."""
        self._reclaiming.ask(command)

    def start_level(self, command: StartLevel) -> None:
        """Let new rows start at a level of the ladder."""
        self._admission.set_start_level(command.level)

    def pause(self, rid: str) -> None:
        """Give a running request no tokens until `resume`; it keeps its place and memory."""
        self._scheduler.suspend(rid)

    def resume(self, rid: str) -> None:
        """Let a paused request go on."""
        self._scheduler.resume(rid)

    def preempt(self, rid: str) -> None:
        """Take a running request out of the batch until `unpark`; its pages stay.

        What it had launched is read first, and may end it.
        """
        self._settle()
        if (request := self._requests.get(rid)) is not None:
            self._preemption.take_out(request)

    def unpark(self, rid: str) -> None:
        """Let a parked request go on as soon as there is room."""
        self._admission.requeue_preempted(rid)

    # The step.

    def step(self) -> list[Report]:
        """Launch step n+1, read step n, prefill one chunk.

        If memory is short in it, nobody notices but by the time that it takes to come back to
        where everybody was; only if that happens again and again, requests fail, one at a time.
        """
        short = shortage.attempt(self._work)
        if short is None:
            self._out_of_memory.went_well()
        else:
            self._on_phase("pools")
            self._reports += self._out_of_memory.after(short)
        self._steps += 1
        reports, self._reports = self._reports, []
        return reports

    def _work(self) -> None:
        for rid in self._scheduler.expired(self._clock()):
            self._fail(self._requests[rid], deadline_exceeded(self._requests[rid].made))
        plan = self._plan()
        start = time.monotonic()
        landed, self._flight = self._flight, self._launch(plan.decode)
        if landed is not None:
            self._on_phase("decode")
            self._collect(landed)
            self._rates.note("decode", 1, time.monotonic() - start)
        if plan.group:
            self._prefill()
        if self._reclaiming.active:
            self._on_phase("pools")
            self._drain()
            self._reports += self._reclaiming.advance()
        elif self._preemption.busy:
            self._on_phase("pools")
            self._drain()
            self._preemption.work(POOL_SECONDS)
        elif self._runner.cache.lacks_room:
            self._on_phase("pools")
            self._drain()
            self._runner.cache.make_room(POOL_SECONDS, time.monotonic)
        if not (self._requests or self._reclaiming.active):
            self._rest()

    def _plan(self) -> Plan:
        result = self._admit()
        if result.evict_pages and self._evict(result.evict_pages):
            result = self._admit()
        if result.plan.missing_pages and self._give_up_spare():
            result = self._admit()
        self._ask_for_checkpoints()
        here = tuple(rid for rid in result.plan.decode if rid not in self._preemption.loading)
        return dataclasses.replace(result.plan, decode=here)

    def _ask_for_checkpoints(self) -> None:
        wanted = self._prefix_cache.wanted_bytes
        if self._scheduler.start_level or self._scheduler.waiting:
            return  # others have better use for it
        if wanted:
            pages = 2 + wanted // self._admission.budget.page_bytes  # one for rounding
            self._wish(self._admission.request_spare(pages, self._memory.held()))

    def _wish(self, wish: MemoryRequested | None) -> None:
        if wish is not None:
            self._report(replace(wish, reclaimable=self._memory.reclaimable()))

    def _report(self, report: Report) -> None:
        self._reports.append(report)

    def _evict(self, pages: int) -> bool:
        """Drop checkpoints for so many pages; return whether that freed anything."""
        if not self._prefix_cache.evict(pages * self._admission.budget.page_bytes):
            return False
        self._drain()
        self._on_phase("pools")
        self._runner.cache.compact(self._memory.needed_pages)
        return True

    def _admit(self) -> AdmissionResult:
        result = self._admission.admit(self._memory.held())
        self._memory.held()  # who was admitted has places now, which pools must leave room for
        self._wish(result.memory_request)
        self._reports += result.queue_positions
        if result.refused is not None:
            rid, error = result.refused
            self._fail(self._requests[rid], error)
        for rid in result.plan.admitted:
            request = self._requests[rid]
            request.level = self._scheduler.find(rid).level
            request.over.record_level(request.level)
            request.tracked.lowered = request.level > 0
            if rid not in result.plan.resumed:
                self._report(RowAdmitted(rid=rid))
        for rid in result.plan.resumed:
            self._on_phase("pools")
            self._preemption.resume(self._requests[rid])
        if result.swap_out_kept:
            self._preemption.spill()
        return result

    def _launch(self, rids: tuple[str, ...]) -> _Flight | None:
        live = []
        for rid in rids:
            request = self._requests[rid]
            if not request.begun:
                self._branch(request)
            live += [one for one in request.live if one.launched < request.max_new]
        if not live:
            return None
        cache = self._runner.cache
        rows = [_row(completion) for completion in live]
        if cache.needs_flush(rows):
            self._flush()
        self._on_phase("decode")
        logits = self._runner.decode(rows, self._inputs(live))
        flight = self._draw(logits, live, rows)
        mx.async_eval(flight.arrays, cache.arrays())  # type: ignore[no-untyped-call]
        for completion in live:
            completion.launched += 1
        self._most_rows = max(self._most_rows, len(rows))
        return flight

    def _draw(self, logits: mx.array, live: list[Completion], rows: list[Row]) -> _Flight:
        """Draw the next token of each row, but for those whose next one was sent before."""
        drawing = [at for at, one in enumerate(live) if one.launched >= one.known]
        replayed: list[Completion] = []
        if len(drawing) < len(live):
            replayed = [one for one in live if one.launched < one.known]
            if not drawing:
                return _Flight([], replayed, None, {}, [logits])
            logits = logits[mx.array(drawing)]
            live, rows = [live[at] for at in drawing], [rows[at] for at in drawing]
        draw = self._sampler.draw(
            logits, [completion.key for completion in live], [row.length for row in rows]
        )
        where = {one.key: at for at, one in enumerate(live)}
        return _Flight(live, replayed, draw, where, draw.arrays())

    def _branch(self, request: Request) -> None:
        """Turn the row that a prompt was read into into one for each completion."""
        cache = self._runner.cache
        if request.row is None:  # a prompt of one token
            self._reports += self._prompts.begin_alone(request)
        request.begun = True
        row, request.row = request.row, None
        others = request.completions[1:]
        if others:
            self._drain()
            snapshot = cache.snapshots.take(row)
            for completion in others:
                self._join(request, completion, cache.restore(snapshot))
            cache.snapshots.drop(snapshot)
        self._join(request, request.completions[0], row)

    def _join(self, request: Request, completion: Completion, row: Row) -> None:
        completion.row = row
        self._sampler.add(
            completion.key, request.settings(completion), request.prompt, completion.tokens
        )

    def _leave(self, completion: Completion) -> None:
        self._sampler.remove(completion.key)
        self._runner.cache.free(completion.row, clean=completion.trusted)
        completion.row = None

    def _inputs(self, live: list[Completion]) -> mx.array:
        """Return the rows' input tokens: of the step in flight, or the last that is known."""
        flight = self._flight
        last = [one.input(self._requests[one.key[0]].prompt[-1]) for one in live]
        if flight is None or flight.draw is None:
            return mx.array(last, mx.int32)
        tokens: mx.array = flight.draw.tokens
        if live == flight.completions:
            return tokens
        size = len(flight.completions)
        index = [flight.where.get(one.key, size + at) for at, one in enumerate(live)]
        return mx.concatenate([tokens, mx.array(last, mx.int32)])[mx.array(index)]

    def _collect(self, landed: _Flight) -> None:
        for completion in landed.replayed:
            if completion.ended and not completion.released:
                self._release(self._requests[completion.key[0]], completion)
        read = [] if landed.draw is None else landed.draw.read()
        for completion, drawn in zip(landed.completions, read, strict=True):
            if completion.released:  # with its request, by a completion before it here
                continue
            completion.trusted = drawn.trusted
            request = self._requests[completion.key[0]]
            if completion.ended:
                self._release(request, completion)
            elif drawn.trusted:
                self._deliver(request, completion, drawn)
            else:
                self._fail_bad(request)

    def _deliver(self, request: Request, completion: Completion, drawn: SampledToken) -> None:
        stream = completion.stream
        text = stream.push(drawn.token)
        shown = [] if stream.ended else [drawn.token]
        index = len(completion.tokens)
        completion.tokens.append(drawn.token)
        self._generated_tokens += 1
        over = stream.stopped or len(completion.tokens) == request.max_new
        if over and not stream.stopped:
            text += stream.finish()
        if completion.said_bytes:
            text = completion.unsaid(text)
        if shown or text:
            told = None
            if drawn.scored is not None:
                scored = drawn.scored
                told = [
                    self._text.token_logprob(token, scored.logprob, scored.top) for token in shown
                ]
            rid, choice = completion.key
            self._reports.append(
                RowTokens(
                    rid=rid, index=index, tokens=shown, text=text, choice=choice, logprobs=told
                )
            )
        if over:
            self._finish(request, completion, "stop" if stream.stopped else "length")

    def _finish(self, request: Request, completion: Completion, reason: FinishReason) -> None:
        self._reports += request.over.finish(completion.key[1], reason, len(completion.tokens))
        self._end(request, completion)

    def _fail(self, request: Request, error: KvdError) -> None:
        self._reports.append(RowFailed(rid=request.rid, error=error.info()))
        for completion in request.live:
            self._end(request, completion)

    def _fail_bad(self, request: Request) -> None:
        """End a request with bad logits; nothing that it has read or left is used again."""
        self._prefix_cache.drop_untrusted(request.tracked)
        self._fail(
            request,
            NumericalError("the model's output for this request is not finite or constant"),
        )

    def _end(self, request: Request, completion: Completion) -> None:
        completion.ended = True
        if self._flight is None or not self._flight.has(completion):
            self._release(request, completion)

    def _release(self, request: Request, completion: Completion) -> None:
        cache, decodes = self._runner.cache, completion.row is not None
        if decodes:
            self._leave(completion)
        if completion.snapshot is not None:
            cache.snapshots.drop(completion.snapshot)
        completion.released = True
        request.completions.remove(completion)
        if request.completions:
            if decodes:
                self._admission.finish_choice(request.rid)
            return
        if request.row is not None:
            cache.free(request.row, clean=False)  # nobody has seen logits of it
        if request.snapshot is not None:
            cache.snapshots.drop(request.snapshot)
        self._prefix_cache.remove(request.tracked)
        self._preemption.forget(request)
        self._admission.finish(request.rid)
        del self._requests[request.rid]

    def _prefill(self) -> None:
        self._on_phase("prefill")
        self._drain()
        group = next_chunks(self._scheduler, self._is_known, self._begin_prompt)
        if not group:
            return  # who was to read is brought back first
        start = time.monotonic()
        self._reports += self._prompts.read(
            [(self._requests[chunk.rid], chunk.start, chunk.end) for chunk in group]
        )
        read = sum(chunk.length for chunk in group)
        self._rates.note("prefill", read, time.monotonic() - start)
        for chunk in group:
            if (request := self._requests[chunk.rid]).distrusted:
                self._fail_bad(request)
            else:
                self._scheduler.mark_prefilled(chunk.rid, chunk.end)

    def _is_known(self, rid: str) -> bool:
        return self._prefix_cache.has_new_hit(self._requests[rid].tracked)

    def _begin_prompt(self, rid: str) -> int:
        return self._prompts.begin(self._requests[rid])

    def _flush(self) -> None:
        self._on_phase("flush")
        self._drain()
        self._runner.cache.flush()

    def _drain(self) -> None:
        if self._flight is not None:
            mx.eval(self._flight.arrays, self._runner.cache.arrays())

    def _settle(self) -> None:
        """Read what is in flight, so that nothing is."""
        landed, self._flight = self._flight, None
        if landed is not None:
            mx.eval(landed.arrays, self._runner.cache.arrays())
            self._collect(landed)

    def _forget_flight(self) -> None:
        self._flight = None

    def _redraw(self) -> None:
        self._sampler = Sampler(self._vocabulary)

    # Memory.

    def _give_up_spare(self) -> bool:
        """Cut pools down to what rows have reserved; return whether that freed anything.

        Only where it helps the head of the queue, which may wait for long: pools grow again. Where
        no row is left, tails go too: who waits may need more pages and fewer of them.
        """
        cache = self._runner.cache
        if not cache.sequences and cache.tail_slots and not self._reclaiming.active:
            self._on_phase("pools")
            cache.shrink()
            return True
        needed = self._memory.needed_pages
        head = self._scheduler.head
        with_head = needed + (head.missing_pages if head else 0)
        if self._reclaiming.active or self._memory.charged_pages <= with_head:
            return False
        self._drain()
        self._on_phase("pools")
        freed: int = cache.compact(needed)
        return freed > 0

    def _rest(self) -> None:
        """Give memory back when nobody is there: one slab stays for the next request.

        Less where the governor has taken that too.
        """
        cache = self._runner.cache
        cached = self._memory.cached_pages
        slab = max(0, min(SLAB_PAGES, self._admission.budget.pages - cached))
        if self._memory.charged_pages > slab + cached or cache.tail_slots > FIRST_ROWS:
            self._on_phase("pools")
            cache.shrink(slab)
            loading.give_back()
        self._wish(self._admission.give_back_idle(cached))

    def stats(self) -> WorkerStats:
        """Return the counters."""
        cache = self._runner.cache
        usage = cache.usage
        return WorkerStats(
            step=self._steps,
            rows_running=self._scheduler.decoding,
            rows_prefilling=self._scheduler.prefilling,
            rows_waiting=self._scheduler.waiting,
            max_rows_in_step=self._most_rows,
            pages_used=usage.pages_used - usage.pages_idle,
            pages_total=usage.pages_total,
            flushes=usage.flushes,
            kernel_launches=self._runner.launches,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._prompts.computed,
            generated_tokens=self._generated_tokens,
            prefix=self._prefix_cache.usage,
            reclaimable=self._memory.reclaimable(),
            memory=MemoryUse(
                weights=self._weights_bytes,
                kv_pages=usage.pages_bytes,
                kv_pages_used=usage.used_bytes,
                kv_levels=usage.level_bytes,
                kv_tails=usage.tails_bytes + cache.snapshot_bytes,
                scratch=self._scratch_bytes,
                active=mx.get_active_memory(),
                peak=_peak_memory(),
                cache=mx.get_cache_memory(),
            ),
        )

    def close(self) -> None:
        """Wait for the device; the process's exit does the rest, but for files."""
        self._drain()
        mx.synchronize()
        if self._folder is not None:
            self._folder.clear()


def _peak_memory() -> int:
    """Return the most that was active since this was asked last, in bytes."""
    peak = mx.get_peak_memory()
    mx.reset_peak_memory()
    return peak


def _row(completion: Completion) -> Row:
    assert completion.row is not None, "only admitted rows decode"
    return completion.row
