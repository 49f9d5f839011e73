r"""Shows what an engine does from the arrival of several requests on: first tokens, gaps, CPU time.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_THREAD_TIMEOUT=12 \
    python -m bench.timeline [--model demo] [--rows 8] [--prompt 200] [--shared 0] [--new 128]
                             [--chunk 256] [--rounds 3] [--steps] [--json FILE]
                             [--whole-passes | --stage-steps 4] [--budget-gib 8] [--scratch-gib G]

The engine runs in this process, without a daemon. All requests arrive at once. A time is taken when
a report leaves the engine. The prompts have ``--prompt`` tokens. All begin with the same
``--shared`` tokens, which the prefix cache has from the second round on. ``--steps`` prints each
step of the last round: its phases, the tokens that it prefilled and delivered, its duration, and
the CPU time of each thread. ``--profile FILE`` writes a cProfile of the main thread.
``--whole-passes`` runs no decode steps between the stages of a pass, and with ``--stage-steps N`` a
stage takes at least as long as N steps. ``--json FILE`` writes the summaries, and the steps of all
rounds. The engine's grants have ``--budget-gib``, and its attention ``--scratch-gib``.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

from kvd.bench.measure import percentile
from kvd.config.kv import parse_kv
from kvd.worker.core import interleaving
from kvd.worker.core.engine import MLXEngine
from protocol.kv import BitsMode
from protocol.types import Sampling
from protocol.worker import Grant, LoadModel, MemoryRequested, Report, RowTokens, Submit

BUDGET_GIB = 8


class ThreadTimes:
    """CPU milliseconds of each thread of this process. Files stay open, which halves the cost."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def __call__(self) -> dict[int, float]:
        """Return the times by thread id."""
        for thread in Path("/proc/self/task").iterdir():
            if int(thread.name) not in self._files:
                self._files[int(thread.name)] = os.open(thread / "schedstat", os.O_RDONLY)
        found = {}
        for number, file in self._files.items():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                found[number] = int(os.pread(file, 64, 0).split()[0]) / 1e6
        return found


@dataclass
class Step:
    """One step of the engine; times in milliseconds since the requests arrived."""

    begin: float
    end: float = 0.0
    phases: list[str] = field(default_factory=list)
    prefilled: int = 0
    delivered: int = 0
    main_ms: float = 0.0
    other_ms: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        others = " ".join(f"{ms:5.2f}" for ms in self.other_ms.values() if ms > 0.05)
        return (
            f"{self.begin:8.1f} +{self.end - self.begin:6.2f} ms  {self.prefilled:4} prefilled"
            f" {self.delivered:2} tokens  main {self.main_ms:5.2f} others {others:24}"
            f" {' '.join(self.phases)}"
        )


class Timeline:
    """One engine with a model."""

    def __init__(
        self,
        model: str,
        kv: str,
        chunk: int,
        *,
        whole_passes: bool,
        bits_by_layer: BitsMode = "auto",
        budget_gib: int = BUDGET_GIB,
        scratch_gib: int | None = None,
    ) -> None:
        self.engine = MLXEngine()
        self._budget = budget_gib << 30
        self._total = 0
        self._seq = 0
        self._start = 0.0
        self.arrivals: dict[str, list[float]] = {}
        self.steps: list[Step] = []
        self._thread_times = ThreadTimes()
        command = LoadModel(
            source=model, kv=parse_kv(kv), prefill_chunk=chunk, bits_by_layer=bits_by_layer
        )
        if scratch_gib is not None:
            command = replace(command, attention_scratch=scratch_gib << 30)
        self.info = self.engine.load(command, lambda *_: None, self._ask)
        if whole_passes:
            self.engine._prompts._runner.interleaves = False  # noqa: SLF001
        self.engine.watch(self._note_phase, self._take)

    def _ask(self, total: int, _: str) -> Grant:
        self._seq += 1
        return self._grant(self._seq, total)

    def _grant(self, seq: int, total: int) -> Grant:
        self._total = total
        return Grant(
            seq=seq,
            total_bytes=total,
            granted=True,
            available_bytes=self._budget - total,
            limit_bytes=self._budget,
            budget_bytes=self._budget,
        )

    def _note_phase(self, phase: str) -> None:
        if self.steps:
            self.steps[-1].phases.append(f"{phase}@{self._now() - self.steps[-1].begin:.1f}")

    def _now(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def _take(self, reports: list[Report]) -> None:
        now = self._now()
        for report in reports:
            if isinstance(report, RowTokens):
                self.arrivals[report.rid] += [now] * len(report.tokens)
                self.steps[-1].delivered += len(report.tokens)
            elif isinstance(report, MemoryRequested):
                self.engine.granted(self._grant(report.seq, report.total_bytes))

    def play(self, rows: int, prompt: int, new: int, seed: int, shared: int = 0) -> None:
        """Serve one round of requests."""
        self.arrivals, self.steps = {}, []
        engine, main = self.engine, threading.get_native_id()
        self._start = time.perf_counter()
        for row in range(rows):
            rid = f"r{row}"
            self.arrivals[rid] = []
            tokens = [1 + 7 * at % 4000 for at in range(shared)]
            tokens += [1 + (7 * at + 31 * row + 977 * seed) % 4000 for at in range(shared, prompt)]
            greedy = Sampling(temperature=0.0)
            engine.submit(
                Submit(rid=rid, tokens=tokens, max_tokens=new, sampling=greedy, ignore_eos=True)
            )
        while engine.has_work:
            before, computed = self._thread_times(), engine._prompts.computed_tokens  # noqa: SLF001
            self.steps.append(Step(self._now()))
            self._take(engine.step())
            step, after = self.steps[-1], self._thread_times()
            step.end = self._now()
            step.prefilled = engine._prompts.computed_tokens - computed  # noqa: SLF001
            used = {thread: ms - before.get(thread, 0.0) for thread, ms in after.items()}
            step.main_ms = used.pop(main)
            step.other_ms = used

    def summary(self) -> str:
        """Return first tokens, gaps, and the CPU time of steps that only decode."""
        firsts = [times[0] for times in self.arrivals.values()]
        gaps = [b - a for times in self.arrivals.values() for a, b in pairwise(times)] or [0.0]
        decode = [step for step in self.steps if not step.prefilled]
        others = [sum(step.other_ms.values()) for step in decode]
        tokens = sum(map(len, self.arrivals.values()))
        return (
            f"{1e3 * tokens / self.steps[-1].end:6.0f} tok/s"
            f"  first token p50 {percentile(firsts, 50):5.0f} last {max(firsts):5.0f} ms"
            f"  gap p50 {percentile(gaps, 50):5.2f} p99 {percentile(gaps, 99):5.1f}"
            f" max {max(gaps):5.1f} ms"
            f"  decode step {statistics.median(one.end - one.begin for one in decode):5.2f} ms,"
            f" main {statistics.median(one.main_ms for one in decode):5.2f} ms CPU,"
            f" others {statistics.median(others):5.2f}"
        )


def main() -> None:
    """Play the rounds, and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--whole-passes", action="store_true")
    parser.add_argument("--stage-steps", type=float)
    parser.add_argument("--budget-gib", type=int, default=BUDGET_GIB)
    parser.add_argument("--scratch-gib", type=int, help="of attention; default: the engine's own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.stage_steps is not None:
        interleaving.STAGE_STEPS = interleaving.GPU_STAGE_STEPS = options.stage_steps
    timeline = Timeline(
        options.model,
        options.kv,
        options.chunk,
        whole_passes=options.whole_passes,
        budget_gib=options.budget_gib,
        scratch_gib=options.scratch_gib,
    )
    timeline.play(1, 40, 8, 99)
    profile = cProfile.Profile()
    rounds = []
    for round_ in range(options.rounds):
        if options.profile:
            profile.enable()
        timeline.play(options.rows, options.prompt, options.new, round_, options.shared)
        profile.disable()
        print(timeline.summary(), flush=True)
        steps = [asdict(step) for step in timeline.steps]
        rounds.append({"summary": timeline.summary(), "steps": steps})
        if options.json:
            options.json.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")
    if options.steps:
        print(*timeline.steps, sep="\n")
    if options.profile:
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
