"""Time to draw tokens: the engine's sampler, and mlx-lm's, called for each row as in its server.

    python -m bench.sampler [--rows 8] [--vocab 4096 151936] [--dtype float32] [--json FILE]

The engine draws by one operation (`kvd.worker.sampling.direct_draws`), or by operations of MLX
where that cannot be used; both are measured. Logits are random, all rows have the same settings,
and each draw is evaluated at once. Times are medians. If MLX computes on the CPU, they are CPU
times, so that other load does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from bench.report import machine, publish
from kvd.worker.device import on_cpu
from kvd.worker.native.activation import activate
from kvd.worker.sampling import direct_draws
from kvd.worker.sampling.row import RowSettings
from kvd.worker.sampling.sampler import Sampler
from protocol.types import Sampling

PROMPT = list(range(20))
"""As many tokens as mlx-lm's penalties look back, so that both samplers do the same work."""
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
CASES: dict[str, RowSettings] = {
    "greedy": RowSettings(Sampling()),
    "temperature": RowSettings(Sampling(temperature=0.8, seed=1)),
    "top-k 40": RowSettings(Sampling(temperature=0.8, top_k=40, seed=1)),
    "top-p 0.95": RowSettings(Sampling(temperature=0.8, top_p=0.95, seed=1)),
    "all filters": RowSettings(Sampling(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, seed=1)),
    "greedy, penalties": RowSettings(Sampling(**PENALTIES)),
    "temperature, penalties": RowSettings(Sampling(temperature=0.8, seed=1, **PENALTIES)),
    "greedy, 20 logprobs": RowSettings(Sampling(), logprobs=20),
}


def ours(logits: mx.array, row: RowSettings) -> Callable[[int], object]:
    """Return a function that draws a token for all rows with kvd's sampler."""
    rows, vocabulary = logits.shape
    sampler = Sampler(vocabulary)
    keys = list(range(rows))
    for key in keys:
        sampler.add(key, row, PROMPT)

    def step(at: int) -> None:
        mx.eval(sampler.draw(logits, keys, [at] * rows).arrays())

    return step


def theirs(logits: mx.array, row: RowSettings) -> Callable[[int], object]:
    """Return a function that does the same with mlx-lm's processors and sampler, row by row."""
    one = row.sampling
    top_p = one.top_p if one.top_p < 1.0 else 0.0
    draw = make_sampler(one.temperature, top_p=top_p, min_p=one.min_p, top_k=one.top_k)
    processors: list[Any] = []
    if one.repetition_penalty != 1.0:
        processors = make_logits_processors(**PENALTIES)
    tokens = mx.array(PROMPT)

    def step(_at: int) -> None:
        drawn = []
        for at in range(logits.shape[0]):
            mine = mx.array(logits[at : at + 1])
            for process in processors:
                mine = process(tokens, mine)
            drawn.append(draw(mine - mx.logsumexp(mine, axis=-1, keepdims=True)))
        mx.eval(drawn)

    return step


def by_operations(logits: mx.array, row: RowSettings) -> Callable[[int], object]:
    """Return a function that draws with kvd's sampler by operations of MLX."""
    with without_direct_draws():
        return ours(logits, row)


@contextmanager
def without_direct_draws() -> Iterator[None]:
    """Let samplers that are made meanwhile draw by operations of MLX."""
    prepared = direct_draws.prepared
    direct_draws.prepared = lambda _: None
    try:
        yield
    finally:
        direct_draws.prepared = prepared


SIDES = {"kvd": ours, "operations": by_operations, "mlx-lm": theirs}


def measured(step: Callable[[int], object], draws: int) -> float:
    """Return the median milliseconds of ``step``."""
    clock = time.process_time if on_cpu() else time.perf_counter
    step(0)
    times = []
    for at in range(1, draws + 1):
        began = clock()
        step(at)
        times.append(clock() - began)
    return 1000 * statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 151_936])
    parser.add_argument("--draws", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(mx, arguments.dtype)
    library = activate(lambda _stage, _fraction: None).library
    results = []
    for vocabulary in arguments.vocab:
        noise = mx.random.normal((arguments.rows, vocabulary), key=mx.random.key(0))
        logits = (3 * noise).astype(dtype)
        mx.eval(logits)
        direct_draws.prepare(vocabulary, dtype, library)
        for name, row in CASES.items():
            times = {
                side: round(measured(make(logits, row), arguments.draws), 3)
                for side, make in SIDES.items()
            }
            results.append({"vocabulary": vocabulary, "case": name, "ms": times})
            shown = ", ".join(f"{side} {value:.2f} ms" for side, value in times.items())
            print(f"{vocabulary:7d}  {name:24}{shown}", flush=True)
    about = {
        "rows": arguments.rows,
        "dtype": arguments.dtype,
        "clock": "CPU" if on_cpu() else "wall",
    }
    publish({"machine": machine(), **about, "draws": results}, arguments.json)


if __name__ == "__main__":
    main()
