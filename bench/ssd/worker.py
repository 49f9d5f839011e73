"""An engine in this process with a prefix store of its own, in place of a daemon and its worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.worker.core.engine import MLXEngine
from protocol.kv import KVSpec
from protocol.segments import SegmentInfo
from protocol.types import Sampling, TokenLogprob
from protocol.worker import (
    Grant,
    LoadModel,
    MemoryRequested,
    Reclaim,
    Reclaimed,
    Report,
    RowFailed,
    RowFinished,
    RowTokens,
    SegmentAllowed,
    SegmentDamaged,
    SegmentOffered,
    SegmentsChanged,
    SegmentsOpened,
    SegmentUsed,
    SegmentWritten,
    Submit,
)

WRITE_LIMIT_S = 120.0
"""Longest time to wait for segments to be written."""


@dataclass
class Answer:
    """One request, as its client sees it. Times are in seconds of `time.perf_counter`."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    over: bool = False
    read: SegmentUsed | None = None
    """The segment that the prompt continued from."""
    read_at: float | None = None
    """When the engine had read it."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    def equals(self, other: Answer) -> bool:
        """Whether tokens and logprobs are the same, to the bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


class Worker:
    """An engine whose memory requests are all granted and whose segments are all written.

    ``segments_folder``: folder of the store, which must exist.
    """

    def __init__(
        self, model: str, segments_folder: Path, *, kv: KVSpec, chunk: int, budget_bytes: int
    ) -> None:
        self.engine = MLXEngine()
        self.segments: dict[bytes, SegmentInfo] = {}
        self.written: list[SegmentWritten] = []
        """Reports of written segments, the oldest first."""
        self.may_write = True
        self._budget = budget_bytes
        self._total = 0
        self._requests = 0
        self._answers: dict[str, Answer] = {}
        self._reclaiming = False
        start = time.perf_counter()
        self.info = self.engine.load(
            LoadModel(
                source=model, kv=kv, prefill_chunk=chunk, segments_folder=str(segments_folder)
            ),
            lambda _stage, _fraction: None,
            lambda total, _reason: self._grant(total),
        )
        self.load_s = time.perf_counter() - start
        self.step()

    def _grant(self, total: int, seq: int = 0) -> Grant:
        granted = total <= max(self._budget, self._total)
        if granted:
            self._total = total
        return Grant(
            seq=seq,
            total_bytes=self._total,
            granted=granted,
            available_bytes=max(0, self._budget - self._total),
            limit_bytes=self._budget,
            budget_bytes=self._budget,
        )

    def send(
        self,
        tokens: list[int],
        *,
        max_tokens: int,
        salt: str | None = None,
        logprobs: int | None = None,
    ) -> tuple[str, Answer]:
        """Submit a greedy request; return its id and its answer, which `step` fills."""
        self._requests += 1
        rid = f"r{self._requests}"
        answer = self._answers[rid] = Answer(time.perf_counter())
        answer.prompt_tokens = self.engine.submit(
            Submit(
                rid=rid,
                tokens=tokens,
                sampling=Sampling(temperature=0.0, seed=0),
                max_tokens=max_tokens,
                ignore_eos=True,
                logprobs=logprobs,
                prefix_salt=salt,
            )
        )
        return rid, answer

    def ask(self, tokens: list[int], *, max_tokens: int, salt: str | None = None) -> Answer:
        """Submit a request with logprobs and step until its end."""
        _, answer = self.send(tokens, max_tokens=max_tokens, salt=salt, logprobs=2)
        self.run(lambda: answer.over)
        return answer

    def run(self, until: Callable[[], bool]) -> None:
        """Step until a condition holds; raises `RuntimeError` if the engine stops before."""
        while not until():
            if not self.engine.has_work:
                raise RuntimeError("the engine has nothing to do, but the request did not end")
            self.step()

    def forget(self) -> None:
        """Drop all checkpoints from memory, as when the governor evicts them."""
        nbytes = self.engine.stats().reclaimable.prefixes
        if nbytes:
            self._reclaiming = True
            self.engine.reclaim(Reclaim(seq=1, method="prefixes", wanted_bytes=nbytes))
            self.run(lambda: not self._reclaiming)

    def write_all(self) -> None:
        """Wait until the idle engine has written all segments that are worth it."""
        end = time.monotonic() + WRITE_LIMIT_S
        while self.engine.has_work or self.engine.next_deadline is not None:
            if time.monotonic() > end:
                raise RuntimeError(f"segments are not written after {WRITE_LIMIT_S:g} s")
            if self.engine.has_work:
                self.step()
            else:
                time.sleep(0.01)

    def step(self) -> None:
        """Run one step and handle its reports."""
        reports = self.engine.step()
        now = time.perf_counter()
        for report in reports:
            self._handle(report, now)

    def _handle(self, report: Report, now: float) -> None:
        match report:
            case RowTokens(rid=rid):
                answer = self._answers[rid]
                answer.tokens += report.tokens
                answer.arrivals += [now] * len(report.tokens)
                answer.logprobs += report.logprobs or []
            case RowFinished(rid=rid):
                answer = self._answers.pop(rid)
                answer.cached_tokens = report.usage.cached_tokens
                answer.over = True
            case RowFailed():
                raise RuntimeError(f"a request failed: {report.error.message}")
            case MemoryRequested():
                self.engine.granted(self._grant(report.total_bytes, report.seq))
            case Reclaimed():
                self._reclaiming = False
            case _:
                self._handle_segments(report, now)

    def _handle_segments(self, report: Report, now: float) -> None:
        """Do the daemon's part of the prefix store."""
        match report:
            case SegmentsOpened():
                added = list(self.segments.values())
                self.engine.segment_command(SegmentsChanged(added=added))
            case SegmentOffered(segment=segment):
                allowed = SegmentAllowed(key=segment.key, allowed=self.may_write)
                self.engine.segment_command(allowed)
            case SegmentWritten(segment=segment):
                self.segments[segment.key] = segment
                self.written.append(report)
            case SegmentUsed():
                # One request reads at a time: the one without a token yet.
                (reader,) = [it for it in self._answers.values() if not it.tokens]
                reader.read, reader.read_at = report, now
            case SegmentDamaged():
                raise RuntimeError(f"a segment cannot be read: {report.reason}")
            case _:
                pass
