"""An engine without tensors, for tests and demonstrations of the daemon without MLX.

Speed, load time, sizes and faults come from the model's name (`kvd.worker.fake.model`). Tokens are
a function of prompt, seed, choice and position (`kvd.worker.fake.tokens`): logit bias, penalties
and filters have no effect. Requests with tools, reasoning or grammars get scripted answers
(`kvd.worker.fake.script`). Memory requests, queue, prefill and prefix cache work as in the real
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvd.worker.core.replay import check_resume
from kvd.worker.engine import AskGrant, OnPhase, OnReports, ReportProgress, ignore_phase
from kvd.worker.fake.embedding import check_embed, embedded
from kvd.worker.fake.model import FakeModel, parse
from kvd.worker.fake.pages import FakePages
from kvd.worker.fake.reclaiming import FakeReclaiming, sizes_of
from kvd.worker.fake.row import FakeChoice, FakeRow, prompt_of
from kvd.worker.fake.tokens import VOCABULARY, FakeTokens
from kvd.worker.prefix.cache import PrefixCache, next_chunks
from kvd.worker.prefix.tree import PrefixTree
from kvd.worker.process.memory_limit import limit
from kvd.worker.scheduling.admission import Admission, AdmissionResult, Held
from kvd.worker.scheduling.budget import PageBudget, load_refusal
from kvd.worker.scheduling.scheduler import Scheduler
from kvd.worker.text.choices import Choices, check_token_ids, deadline_exceeded
from protocol import worker as wire
from protocol.errors import ContextTooLong, KvdError, NumericalError
from protocol.messages import FinishReason
from protocol.types import MemoryUse, ModelInfo, WorkerStats


@dataclass
class FakeEngine:
    """`kvd.worker.engine.Engine` without a model."""

    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _model: FakeModel = field(default_factory=FakeModel)
    _rows: dict[str, FakeRow] = field(default_factory=dict)
    _reports: list[wire.Report] = field(default_factory=list)
    _steps: int = 0
    _next_step_at: float = 0.0
    _on_phase: OnPhase = ignore_phase
    _most_rows: int = 0
    _prompt_tokens: int = 0
    _computed_tokens: int = 0
    _generated_tokens: int = 0

    def load(
        self, command: wire.LoadModel, progress: ReportProgress, ask_grant: AskGrant
    ) -> ModelInfo:
        model, kv = parse(command.source), command.kv
        context = min(model.context, command.max_context or model.context)
        self._model = model = msgspec.structs.replace(model, context=context)
        total = model.weights + model.pages * model.page_bytes
        limit.start()
        if model.load_grow:
            model.grow(self.sleep)
        grant = ask_grant(total, "weights and first pages")
        if not grant.granted:
            raise load_refusal(total, "weights and first pages", grant)
        model.simulate_load(progress, self.sleep)
        budget = PageBudget(
            model.weights, model.page_bytes, grant.total_bytes, grant.seq, grant.limit_bytes
        )
        self._scheduler = Scheduler(
            max_rows=command.max_rows,
            chunk=command.prefill_chunk,
            group=True,
            sizes=sizes_of(kv),
            ahead=model.ahead,
        )
        self._admission = Admission(self._scheduler, budget, row_pages=0, idle_pages=model.pages)
        self._pages = FakePages(model.page_bytes)
        cap_bytes = command.prefix_bytes if kv.prefix_cache is None else kv.prefix_cache
        tree = PrefixTree(self._pages, command.prefill_chunk, kv.prefix_every, cap_bytes)
        self._prefix_cache = PrefixCache(tree)
        where: wire.PreemptionMode = "disk" if command.swap_folder else "recompute"
        self._reclaiming = FakeReclaiming(
            self._admission, self._prefix_cache, self._rows, where, self._report
        )
        return model.info(kv)

    # Commands.

    def submit(self, request: wire.Submit) -> int:
        prompt = prompt_of(request)
        room = self._model.context - len(prompt)
        if room < 1 or (request.max_tokens or 1) > room:
            raise ContextTooLong(
                f"prompt and completion take {len(prompt)} + {request.max_tokens or 1} tokens, but"
                f" the model's context is {self._model.context}",
                prompt_tokens=len(prompt),
                context_length=self._model.context,
            )
        check_token_ids(request, VOCABULARY)
        if request.embed is not None:
            check_embed(request.embed)
        salt, scored = request.prefix_salt or "", request.prompt_logprobs is not None
        sampling = request.sampling
        seed = 0 if sampling.temperature == 0.0 else 1 + (sampling.seed or 0)
        row = FakeRow(
            request,
            request.max_tokens or room,
            self._model.ends_at(request.max_tokens),
            FakeTokens(prompt, seed),
            self._prefix_cache.track(request.rid, memoryview(prompt), salt, full_prefill=scored),
            self._pages.of(prompt, salt),
            Choices(request, len(prompt)),
        )
        check_resume(request, VOCABULARY)
        reports = row.replay()
        if row.choices:
            self._admission.submit(
                row.rid,
                len(prompt),
                row.max_new,
                priority=request.priority,
                deadline=None if request.deadline_s is None else self.clock() + request.deadline_s,
                choices=len(row.choices),
                path=() if scored else row.tracked.path,
                open_ended=request.max_tokens is None,
                generated=row.longest,
            )
            self._rows[row.rid] = row
            self._prefix_cache.enqueue(row.tracked)
            self._prompt_tokens += len(prompt)
        self._reports += reports
        return len(prompt)

    def tokenize(self, request: wire.Tokenize) -> wire.Tokenized:
        prompt = list(prompt_of(request))
        tokens = prompt[: request.limit]
        texts = [chr(token) for token in tokens] if request.texts else []
        return wire.Tokenized(seq=request.seq, count=len(prompt), tokens=tokens, texts=texts)

    def cancel(self, rid: str) -> None:
        if (row := self._rows.get(rid)) is not None:
            for choice in row.choices:
                self._reports += row.over.finish(choice.number, "cancelled", choice.tokens)
            self._release(row)

    def granted(self, grant: wire.Grant) -> None:
        self._admission.granted(grant)

    def reclaim(self, command: wire.Reclaim) -> None:
        self._reclaiming.reclaim(command)

    def start_level(self, command: wire.StartLevel) -> None:
        self._admission.set_start_level(command.level)

    def watch(self, on_phase: OnPhase, _on_reports: OnReports | None = None) -> None:
        self._on_phase = on_phase

    @property
    def has_work(self) -> bool:
        expired = self._scheduler.expired(self.clock())
        return bool(self._reports or expired or self._admission.has_work)

    @property
    def is_idle(self) -> bool:
        return not (self._rows or self._reports)

    @property
    def reads_prompts(self) -> bool:
        return self._scheduler.prefilling > 0 or self._admission.may_admit

    @property
    def next_deadline(self) -> float | None:
        return self._scheduler.next_deadline

    # A step.

    def segment_command(self, _: wire.SegmentCommand) -> None:
        pass

    def drain(self, _: float) -> None:
        pass

    @property
    def keeps_worker(self) -> bool:
        return False

    def step(self) -> list[wire.Report]:
        """Generate a token for each decoding row and prefill a chunk, at the model's speed."""
        self._on_phase("decode")
        self._steps += 1
        self._keep_speed()
        if self._steps == self._model.crash_after:
            self._model.crash()
        if self._steps == self._model.hang_after:
            self._model.hang(self.sleep)
        for rid in self._scheduler.expired(self.clock()):
            self._fail(self._rows[rid], deadline_exceeded(self._rows[rid].made))
        result = self._admit()
        evict_bytes = result.evict_pages * self._model.page_bytes
        if evict_bytes and self._prefix_cache.evict(evict_bytes):
            result = self._admit()
        plan = result.plan
        self._request_memory(result.memory_request)
        self._reports += result.queue_positions
        self._end_or_preempt(result)
        for rid in plan.resumed:
            self._reclaiming.resume(rid)
        if plan.group:
            self._on_phase("prefill")
            self._prefill()
            self._on_phase("decode")
        self._most_rows = max(self._most_rows, len(plan.decode))
        for rid in plan.decode:
            if self._scheduler.is_admitted(rid):  # not preempted for a stalled request
                self._decode(self._rows[rid])
        self._request_memory(self._admission.give_back_idle(self._held.cached))
        return self.take_reports()

    def take_reports(self) -> list[wire.Report]:
        reports, self._reports = self._reports, []
        return reports

    def _keep_speed(self) -> None:
        if self._model.tps <= 0:
            return
        now = self.clock()
        if self._next_step_at > now:
            self.sleep(self._next_step_at - now)
        self._next_step_at = max(now, self._next_step_at) + 1.0 / self._model.tps

    def _admit(self) -> AdmissionResult:
        result = self._admission.admit(self._held)
        new = [rid for rid in result.plan.admitted if rid not in result.plan.resumed]
        self._reports += [wire.RowAdmitted(rid=rid) for rid in new]
        return result

    @property
    def _held(self) -> Held:
        return Held(cached=self._reclaiming.memory.cached_pages)

    def _evict_excess(self) -> None:
        """Evict checkpoints that the grant does not cover, which were not reserved in advance."""
        excess = self._reclaiming.memory.needed_pages - self._admission.budget.pages
        if excess > 0:
            self._prefix_cache.evict(excess * self._model.page_bytes)

    def _request_memory(self, request: wire.MemoryRequested | None) -> None:
        if request is not None:
            reclaimable = self._reclaiming.memory.reclaimable()
            self._report(msgspec.structs.replace(request, reclaimable=reclaimable))

    def _report(self, report: wire.Report) -> None:
        self._reports.append(report)

    def _prefill(self) -> None:
        for chunk in next_chunks(self._scheduler, self._has_new_hit, self._begin_prefill):
            row = self._rows[chunk.rid]
            self._computed_tokens += chunk.length
            self._scheduler.mark_prefilled(chunk.rid, chunk.end)
            self._prefix_cache.prefilled(row.tracked, chunk.start, chunk.end, row.pages, lambda: 0)
        self._evict_excess()

    def _has_new_hit(self, rid: str) -> bool:
        return self._prefix_cache.has_new_hit(self._rows[rid].tracked)

    def _begin_prefill(self, rid: str, _: int) -> int:
        row = self._rows[rid]
        hit = self._prefix_cache.begin_prefill(row.tracked)
        self._pages.hold(row.pages)
        row.holds_pages, row.over.cached_tokens = True, hit.tokens
        self._reports += row.cache_report(hit.tokens)
        return hit.tokens

    def _decode(self, row: FakeRow) -> None:
        model = self._model
        if _contains(row, model.crash_on):
            model.crash()
        if _contains(row, model.grow_on):
            model.grow(self.sleep)
        if _contains(row, model.hang_on):
            model.hang(self.sleep)
        if _contains(row, model.nan_on) or row.choices[0].tokens + 1 == model.nan_after:
            self._fail(row, NumericalError("the fake model was asked for bad logits"))
            return
        if row.submit.embed is not None:
            self._report(embedded(row.rid, row.source.prompt, row.submit.embed))
            self._release(row)
            return
        if not row.made:
            self._reports += row.prompt_reports()
        row.over.record_level(self._scheduler.find(row.rid).level)
        self._scheduler.note_generated(row.rid, row.longest + 1)
        for choice in list(row.choices):
            self._generated_tokens += 1
            reports, reason = row.decode(choice)
            self._reports += reports
            if reason is not None:
                self._finish(row, choice, reason)

    def _finish(self, row: FakeRow, choice: FakeChoice, reason: FinishReason) -> None:
        row.over.stop_text = choice.stops.found
        self._reports += row.over.finish(choice.number, reason, choice.tokens)
        row.choices.remove(choice)
        if row.choices:
            self._admission.finish_choice(row.rid)
        else:
            self._release(row)

    def _fail(self, row: FakeRow, error: KvdError) -> None:
        self._report(wire.RowFailed(rid=row.rid, error=error.info()))
        self._release(row)

    def _end_or_preempt(self, result: AdmissionResult) -> None:
        if result.refused is not None:
            rid, error = result.refused
            self._refuse(self._rows[rid], error)
        if result.stalled is not None:
            self._reclaiming.make_room(result.stalled, result.plan.missing_pages)

    def _refuse(self, row: FakeRow, error: KvdError) -> None:
        """End a request that the budget is too small for, as `kvd.worker.core.refusal` does."""
        if row.submit.max_tokens is not None or not row.made:
            self._fail(row, error)
            return
        for choice in list(row.choices):
            self._reports += row.held_back(choice)
            self._finish(row, choice, "length")

    def _release(self, row: FakeRow) -> None:
        if row.holds_pages:
            self._pages.drop(row.pages)
        self._prefix_cache.remove(row.tracked)
        self._admission.finish(row.rid)
        del self._rows[row.rid]
        self._evict_excess()

    def stats(self) -> WorkerStats:
        used = self._scheduler.reserved_pages
        return WorkerStats(
            step=self._steps,
            rows_running=self._scheduler.decoding,
            rows_prefilling=self._scheduler.prefilling,
            rows_waiting=self._scheduler.waiting,
            max_rows_in_step=self._most_rows,
            pages_used=used,
            pages_total=self._admission.budget.pages,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            prefix=self._prefix_cache.usage,
            reclaimable=self._reclaiming.memory.reclaimable(),
            generated_tokens=self._generated_tokens,
            memory=MemoryUse(
                weights=self._model.weights,
                kv_pages=self._admission.budget.pages * self._model.page_bytes,
                kv_pages_used=used * self._model.page_bytes,
            ),
        )

    def close(self) -> None:
        """Do nothing: the process's exit frees everything."""


def _contains(row: FakeRow, text: str) -> bool:
    return bool(text) and text.encode() in row.source.prompt
