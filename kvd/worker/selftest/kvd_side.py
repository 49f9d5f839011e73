"""kvd's side of the speed comparison: an engine, and the part of the daemon that grants memory."""

from __future__ import annotations

import time

import mlx.core as mx

from kvd.worker.core.engine import MLXEngine
from kvd.worker.selftest.stages import Stages
from protocol.errors import InsufficientMemory, InternalError
from protocol.kv import KVSpec
from protocol.speed import Loaded
from protocol.types import Sampling
from protocol.worker import (
    Grant,
    LoadModel,
    MemoryRequested,
    Report,
    RowFailed,
    RowFinished,
    RowTokens,
    Submit,
)


def _without_numbers(stage: str) -> str:
    """Return the name of a part of the load; a worker's progress may name a duration."""
    return "checking steps" if stage.startswith("attention kernels compiled") else stage


class KvdSide:
    """The engine with one model, without prefix cache: no prompt is read twice."""

    def __init__(self, source: str, stages: Stages, budget: int, chunk: int, scratch: int) -> None:
        self._budget, self._granted, self._requests, self._count = budget, 0, 0, 0
        self._engine = MLXEngine()
        info = self._engine.load(
            LoadModel(
                source=source,
                kv=KVSpec(prefix_cache=0),
                prefill_chunk=chunk,
                attention_scratch=scratch,
            ),
            lambda stage, _fraction: stages.begin(_without_numbers(stage)),
            self._grant,
        )
        stages.begin("")
        self.vocabulary = info.vocab_size
        self.loaded = Loaded(
            seconds=stages.seconds,
            dtype=info.dtype,
            active_bytes=int(mx.get_active_memory()),
            info=info,
        )

    def _grant(self, total: int, _reason: str) -> Grant:
        self._requests += 1
        return self._answer(self._requests, total)

    def _answer(self, seq: int, total: int) -> Grant:
        granted = total <= max(self._budget, self._granted)
        if granted:
            self._granted = total
        return Grant(
            seq=seq,
            total_bytes=self._granted,
            granted=granted,
            available_bytes=max(0, self._budget - self._granted),
            limit_bytes=self._budget,
            budget_bytes=self._budget,
        )

    def run(self, prompts: list[list[int]], output: int) -> list[list[float]]:
        engine, arrivals = self._engine, {}
        for prompt in prompts:
            self._count += 1
            rid = str(self._count)
            arrivals[rid] = list[float]()
            engine.submit(
                Submit(
                    rid=rid,
                    tokens=prompt,
                    sampling=Sampling(temperature=0.0, seed=0),
                    max_tokens=output,
                    ignore_eos=True,
                )
            )
        running = set(arrivals)
        while running:
            if not engine.has_work:
                raise InsufficientMemory("the rows of a task wait for memory beyond the budget")
            for report in engine.step():
                self._note(report, arrivals, running)
        return list(arrivals.values())

    def _note(self, report: Report, arrivals: dict[str, list[float]], running: set[str]) -> None:
        match report:
            case RowTokens():
                arrivals[report.rid] += [time.monotonic()] * len(report.tokens)
            case RowFinished():
                running.discard(report.rid)
            case RowFailed():
                raise InternalError(report.error.message)
            case MemoryRequested():
                self._engine.granted(self._answer(report.seq, report.total_bytes))
