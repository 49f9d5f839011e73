"""Runs an engine without a worker process: submits requests, steps, and collects the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvd.worker.core.engine import MLXEngine
from protocol.cache_outcome import CacheOutcome, RowCached
from protocol.errors import ErrorInfo
from protocol.kv import KVSpec
from protocol.types import Sampling, TokenLogprob, Usage
from protocol.worker import (
    ChoiceFinished,
    Grant,
    LoadModel,
    MemoryRequested,
    Reclaim,
    Reclaimed,
    Report,
    RowFailed,
    RowFinished,
    RowPreempted,
    RowPrompt,
    RowQueued,
    RowResumed,
    RowTokens,
    SegmentReport,
    Submit,
)
from tests.worker.cache.invariants import check_cache
from tests.worker.core.invariants import check_batch
from tests.worker.scheduling.invariants import check_scheduler

GIB = 1 << 30


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    usage: Usage | None = None
    """The reported usage with ``cached_tokens`` 0, so that prefix hits make no difference."""
    cached: int = field(default=0, compare=False)
    """The reported ``cached_tokens``, which depend on what the prefix cache holds."""
    error: ErrorInfo | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    levels: list[int] = field(default_factory=list, compare=False)
    """Precision level of each token, as reported."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes | None = None
    stop_text: str = ""
    others: dict[int, Outcome] = field(default_factory=dict)
    """Completions except the first, by choice."""

    @property
    def over(self) -> bool:
        return self.reason is not None or self.error is not None


class Driver:
    """An engine, and a stand-in for the daemon, which grants it up to ``budget`` bytes."""

    def __init__(
        self,
        source: str,
        *,
        kv: KVSpec | None = None,
        budget: int = 8 * GIB,
        clock: Callable[[], float] = time.monotonic,
        **load,
    ):
        self.engine = MLXEngine(clock)
        self.budget = budget
        self.total = 0
        self.seq = 0
        self.others = 0
        """Bytes of the budget that other models are assumed to hold."""
        self.denied: tuple[int, int] | None = None
        """The last memory request, if it was denied: its number and bytes."""
        self.asked: list[tuple[int, str]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.stages: list[str] = []
        self.preemptions: dict[str, list[str]] = {}
        """By request: the mode of each preemption, followed by "resumed" once it resumed."""
        self.positions: dict[str, list[int]] = {}
        self.reclaimed: list[Reclaimed] = []
        self.found: dict[str, CacheOutcome] = {}
        """By request: what the prefix cache did for its prompt."""
        self.segments: list[SegmentReport] = []
        """Reports to the prefix store, which a test plays."""
        self.info = self.engine.load(
            LoadModel(source=source, kv=kv or KVSpec(), **load),
            lambda stage, fraction: self.stages.append(stage),
            self.ask,
        )

    def ask(self, total: int, reason: str) -> Grant:
        self.seq += 1
        return self.answer(self.seq, total, reason)

    def answer(self, seq: int, total: int, reason: str) -> Grant:
        self.asked.append((total, reason))
        granted = total <= max(self.budget - self.others, self.total)
        self.denied = None if granted else (seq, total)
        if granted:
            self.total = total
        return Grant(
            seq=seq,
            total_bytes=self.total,
            granted=granted,
            available_bytes=max(0, self.budget - self.others - self.total),
            limit_bytes=self.budget,
            budget_bytes=self.budget,
        )

    def retry(self) -> None:
        """Answer a denied memory request again, as the daemon does when others return memory."""
        if self.denied is not None:
            seq, total = self.denied
            self.engine.granted(self.answer(seq, total, "again"))

    def submit(self, rid: str, prompt: str | list[int], sampling: Sampling | None = None, **more):
        words = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": prompt}
        self.outcomes[rid] = Outcome()
        return self.engine.submit(
            Submit(rid=rid, sampling=sampling or Sampling(seed=0), **words, **more)
        )

    def step(self) -> None:
        self.take(self.engine.step())
        self.check()

    def check(self) -> None:
        """Check what holds after each step."""
        cache, budget = self.engine._runner.cache, self.engine._admission.budget
        # A step-down holds pages at two levels at once; the base includes scratch for that.
        scratch = cache.settings.step_down_scratch if self.engine._reclaiming.active else 0
        assert cache.nbytes <= self.total - budget.base_bytes + scratch
        check_cache(cache)
        check_batch(self.engine._batch)
        check_scheduler(self.engine._scheduler)

    def take(self, reports: list[Report]) -> None:
        for report in reports:
            match report:
                case RowTokens():
                    outcome = self.outcomes[report.rid]
                    assert not outcome.over
                    if report.choice:
                        outcome = outcome.others.setdefault(report.choice, Outcome())
                    assert report.index == len(outcome.tokens)
                    outcome.tokens += report.tokens
                    outcome.text += report.text
                    outcome.levels += [report.level] * len(report.tokens)
                    outcome.logprobs += report.logprobs or []
                case RowPrompt():
                    outcome = self.outcomes[report.rid]
                    assert report.index == len(outcome.prompt_logprobs)
                    outcome.prompt_logprobs += report.logprobs
                case ChoiceFinished():
                    outcome = self.outcomes[report.rid]
                    if report.choice:
                        outcome.others.setdefault(report.choice, Outcome()).reason = report.reason
                case RowFinished():
                    assert not self.outcomes[report.rid].over
                    self.outcomes[report.rid].reason = report.reason
                    self.outcomes[report.rid].embedding = report.embedding
                    self.outcomes[report.rid].stop_text = report.stop_text
                    usage = report.usage
                    self.outcomes[report.rid].cached = usage.cached_tokens
                    self.outcomes[report.rid].usage = msgspec.structs.replace(
                        usage, cached_tokens=0
                    )
                case RowFailed():
                    assert not self.outcomes[report.rid].over
                    self.outcomes[report.rid].error = report.error
                case MemoryRequested():
                    self.engine.granted(self.answer(report.seq, report.total_bytes, report.reason))
                case _:
                    self._note(report)

    def _note(self, report: Report) -> None:
        match report:
            case RowQueued():
                self.positions.setdefault(report.rid, []).append(report.position)
            case RowCached():
                self.found[report.rid] = report.outcome
            case RowPreempted():
                assert report.nbytes > 0
                self.preemptions.setdefault(report.rid, []).append(report.where)
            case RowResumed():
                self.preemptions.setdefault(report.rid, []).append("resumed")
            case Reclaimed():
                self.reclaimed.append(report)
            case _ if isinstance(report, SegmentReport):
                self.segments.append(report)

    def run(self, *, until: Callable[[], bool] | None = None, steps: int = 5000) -> None:
        for _ in range(steps):
            if until is not None and until():
                return
            if not self.engine.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"not finished after {steps} steps")
        if until is None:
            assert all(outcome.over for outcome in self.outcomes.values()), self.outcomes

    def reclaim(self, method: str, wanted_bytes: int, level: int = 0) -> Reclaimed:
        """Reclaim memory, as the governor does, and step until the engine reports the result."""
        before = len(self.reclaimed)
        self.engine.reclaim(Reclaim(seq=7, method=method, wanted_bytes=wanted_bytes, level=level))
        self.run(until=lambda: len(self.reclaimed) > before)
        return self.reclaimed[-1]

    def preempt(self, rid: str) -> None:
        """Take a request out of the batch with its snapshots in memory, until `requeue`."""
        batch = self.engine._batch
        batch.finish_step(late=True)
        if (request := batch.requests.get(rid)) is not None:
            self.engine._preemption.rows.preempt(request)

    def requeue(self, rid: str) -> None:
        self.engine._admission.requeue_preempted(rid)

    def alone(self, prompt: str | list[int], sampling: Sampling | None = None, **more) -> Outcome:
        self.submit("alone", prompt, sampling, **more)
        self.run()
        return self.outcomes.pop("alone")
