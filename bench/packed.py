"""Prefill of many prompts in passes of different sizes: time to the first tokens, host time.

    python -m bench.packed [--model DIR] [--prompts 32x1650 1x50000] [--passes 256 4096]
                           [--chunk 256] [--scratch 256] [--rounds 3] [--json FILE]

An engine in this process gets all prompts of a load at once. Each prompt asks for one token. Sizes
of passes alternate, and results are medians. A size that is not above ``--chunk`` gives passes of
one chunk. Host time is the time of the model's call, which builds a pass's graph. On accelerators
it includes the launch of all stages except the last. The first round of each size compiles kernels
and plans attention; it is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

import mlx.core as mx

from bench.report import machine, publish
from kvd.worker.cache.steps import PackedPrefill
from protocol import memory_bounds
from protocol.kv import KVSpec
from protocol.types import Sampling
from tests.worker.core.driver import GIB, Driver

TOKENS = range(300, 4000)
"""Token ids of prompts: models that benchmarks create have no other embeddings."""


@dataclass
class Passes:
    """Calls of a runner's model in prefill."""

    model: Any
    cache: Any
    host_s: list[float] = field(default_factory=list)

    def __call__(self, tokens: mx.array, **more: Any) -> Any:
        start = time.perf_counter()
        output = self.model(tokens, **more)
        if isinstance(self.cache.stores[0].step, PackedPrefill):
            self.host_s.append(time.perf_counter() - start)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@dataclass
class Result:
    """One load with one size of passes."""

    prompts: int
    tokens: int
    """Tokens of each prompt."""
    pass_tokens: int
    passes: int
    first_s: float
    """Seconds until the first prompt's token."""
    last_s: float
    """Seconds until every prompt has its first token."""
    tokens_per_s: float
    host_ms: float
    """Median milliseconds of host time per pass."""


class Engine:
    """An engine whose passes have up to ``pass_tokens`` tokens."""

    def __init__(
        self, model: str, kv: KVSpec, chunk: int, pass_tokens: int, rows: int, scratch: int
    ) -> None:
        self.pass_tokens = max(chunk, pass_tokens)
        with mock.patch.object(memory_bounds, "pass_tokens", return_value=self.pass_tokens):
            self._driver = Driver(
                model,
                kv=kv,
                budget=1 << 40,
                max_rows=rows,
                prefill_chunk=chunk,
                prefix_bytes=4 * GIB,
                attention_scratch=scratch << 20,
            )
        self._driver.check = lambda: None  # type: ignore[method-assign] - not to be measured
        runner = self._driver.engine._runner  # noqa: SLF001
        if not runner.packs:
            raise SystemExit("this model's passes cannot be packed")
        self._passes = Passes(runner.model, runner.cache)
        runner.model = self._passes

    def run(self, prompts: Sequence[list[int]], number: int) -> Result:
        driver, passes = self._driver, self._passes
        passes.host_s = []
        start = time.perf_counter()
        names = [f"{number}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            greedy = Sampling(temperature=0.0, seed=0)
            driver.submit(name, prompt, greedy, max_tokens=1, ignore_eos=True, prefix_salt=name)
        ends: dict[str, float] = {}
        while len(ends) < len(prompts):
            driver.step()
            now = time.perf_counter() - start
            ends |= {name: now for name in names if driver.outcomes[name].over and name not in ends}
        for name in names:
            if (error := driver.outcomes.pop(name).error) is not None:
                raise SystemExit(f"a request failed: {error.message}")
        last = max(ends.values())
        return Result(
            len(prompts),
            len(prompts[0]),
            self.pass_tokens,
            len(passes.host_s),
            min(ends.values()),
            last,
            sum(map(len, prompts)) / last,
            1000 * statistics.median(passes.host_s),
        )


def prompts_of(load: str, seed: int) -> list[list[int]]:
    """Return the random prompts of a load such as ``32x1650``."""
    count, tokens = map(int, load.split("x"))
    draw = random.Random(seed)
    return [draw.choices(TOKENS, k=tokens) for _ in range(count)]


def median_of(results: Sequence[Result]) -> Result:
    rows = [asdict(result) for result in results]
    return Result(**{key: statistics.median(row[key] for row in rows) for key in rows[0]})


def measure(options: argparse.Namespace) -> list[Result]:
    rows = max(int(load.split("x")[0]) for load in options.prompts)
    kv = KVSpec(k_bits=options.bits, v_bits=options.bits)
    engines = [
        Engine(options.model, kv, options.chunk, size, rows, options.scratch)
        for size in options.passes
    ]
    found = []
    for load in options.prompts:
        results: dict[int, list[Result]] = {engine.pass_tokens: [] for engine in engines}
        for number in range(options.rounds + 1):
            prompts = prompts_of(load, number)
            for engine in engines:
                result = engine.run(prompts, number)
                if number:
                    results[engine.pass_tokens].append(result)
        found += [median_of(some) for some in results.values()]
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.packed", description=__doc__)
    parser.add_argument("--model", default="demo", help="a folder with a model, or demo")
    parser.add_argument("--prompts", nargs="+", default=["32x1650", "1x50000"])
    parser.add_argument("--passes", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--bits", type=int, default=8, help="bits of keys and values")
    parser.add_argument("--scratch", type=int, default=256, help="MiB for dense copies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    results = [asdict(one) for one in measure(options)]
    how = {name: getattr(options, name) for name in ("model", "chunk", "bits", "scratch")}
    publish({**machine(), **how, "results": results}, options.json)


if __name__ == "__main__":
    main()
