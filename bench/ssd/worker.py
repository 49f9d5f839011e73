"""An engine in this process with a prefix store of its own, in place of a daemon and its worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.config.config import Config
from kvd.worker.engine import ignore_phase
from protocol.kv import KVSpec
from protocol.types import Sampling
from protocol.worker import Report, SegmentUsed
from tests.worker.core.driver import Outcome
from tests.worker.core.segments import Engine, Store

WRITE_LIMIT_S = 120.0
"""Longest time to wait for segments to be written."""


@dataclass
class Answer(Outcome):
    """One request, as its client sees it. Times are in seconds of `time.perf_counter`."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    cpu_arrivals: list[float] = field(default_factory=list)
    """CPU time of this process, of all threads, when each token arrived."""
    prompt_tokens: int = 0
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


class Worker(Engine):
    """An engine whose memory requests are all granted and whose segments are all written.

    ``segments_folder``: folder of the store, which must exist.
    """

    def __init__(
        self, model: str, segments_folder: Path, *, kv: KVSpec, chunk: int, budget_bytes: int
    ) -> None:
        self._requests = 0
        self._took_at = 0.0
        """When the newest reports were taken."""
        start = time.perf_counter()
        super().__init__(
            Store(segments_folder),
            kv,
            source=model,
            budget=budget_bytes,
            prefill_chunk=chunk,
            attention_scratch=Config().attention_scratch(budget_bytes),
        )
        self.load_s = time.perf_counter() - start
        self.engine.watch(ignore_phase, self.take)

    def check(self) -> None:
        """Check nothing: that would take time which is measured."""

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
        rid, answer = f"r{self._requests}", Answer(sent=time.perf_counter())
        answer.prompt_tokens = self.submit(
            rid,
            tokens,
            Sampling(temperature=0.0, seed=0),
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            prefix_salt=salt,
        )
        self.outcomes[rid] = answer
        return rid, answer

    def chat(self, tokens: list[int], *, max_tokens: int, salt: str | None = None) -> Answer:
        """Submit a request with logprobs and step until its end."""
        _, answer = self.send(tokens, max_tokens=max_tokens, salt=salt, logprobs=2)
        self.run_until(lambda: answer.over)
        self.rest()
        return answer

    def rest(self) -> None:
        """Let an idle engine return memory, as it does after the worker's pause."""
        if self.engine.is_idle and self.engine.has_work:
            self.step()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Step until a condition holds; raises `RuntimeError` if the engine stops before."""
        while not condition():
            if not self.engine.has_work:
                raise RuntimeError("the engine has nothing to do, but the request did not end")
            self.step()

    def forget(self) -> None:
        """Drop all checkpoints from memory, as when the governor evicts them."""
        if nbytes := self.engine.stats().reclaimable.prefixes:
            self.reclaim("prefixes", nbytes)
        self.rest()

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

    def take(self, reports: list[Report]) -> None:
        """Note when tokens arrive; raises `RuntimeError` for a request that fails."""
        now, cpu = time.perf_counter(), time.process_time()
        self._took_at = now
        super().take(reports)
        for rid, answer in list(self.outcomes.items()):
            if answer.error is not None:
                raise RuntimeError(f"a request failed: {answer.error.message}")
            new = len(answer.tokens) - len(answer.arrivals)
            answer.arrivals += [now] * new
            answer.cpu_arrivals += [cpu] * new
            if answer.over:
                del self.outcomes[rid]

    def step(self) -> None:
        """Run one step and do the daemon's part of the prefix store."""
        reads = len(self.store.used)
        super().step()
        for report in self.store.used[reads:]:
            # One request reads at a time: the one without a token yet.
            (reader,) = [it for it in self.outcomes.values() if not it.tokens]
            reader.read, reader.read_at = report, self._took_at
        if self.store.damaged:
            raise RuntimeError(f"a segment cannot be read: {self.store.damaged[0].reason}")
