"""Cost of stepping down during decode: eight rows of 8192 tokens go from K8V8 to K4V4.

    python -m bench.requantize [--json FILE] [--rows 8] [--tokens 8192] [--scratch-mib 64]

The store has four layers with random keys and values. Two more rows stay on K8V8: their outputs
must be bit-identical to those of a run without the step-down. Each decode step is followed by a
slice of the step-down. When the step-down is over, slices grow pools ahead of need, until two
flushes are done. The time of a step with its slice is compared with the median step before the
step-down, and peak memory with the peak of those steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.batch import make_caches
from kvd.worker.cache.pool_growth import make_room
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.step_down import StepDown
from kvd.worker.cache.store import KVStore

GEOMETRY = LayerGeometry(kv_heads=4, k_dim=128, v_dim=128)
LAYERS = 4
QUERY_HEADS = 8
SCHEMES = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))
TARGET = 2
CHUNK = 1024
UNTOUCHED = 2
UNTOUCHED_TOKENS = 1000
SLICE_S = 0.010
WARM_UP = 3
STEADY_STEPS = 20
MIB = 1 << 20


@dataclass
class Steps:
    """Measurements of consecutive steps."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds, which other processes lengthen less than wall time."""
    slices: list[float] = field(default_factory=list)
    peak: int = 0
    footprint: int = 0
    """Most active and cached bytes at the end of a step."""
    outputs: list[np.ndarray] = field(default_factory=list)
    """Outputs of the rows that are not stepped down."""
    bytes_after: int | None = None
    """Bytes that the store holds when the step-down is over."""
    bytes_formula: int | None = None
    """Bytes that the store should hold at that time."""
    flushes: int = 0
    """Flushes of the store up to that time."""


class Batch:
    """Rows to step down, and rows to leave alone."""

    def __init__(self, rows: int, tokens: int) -> None:
        mx.random.seed(1)
        self.store = KVStore([GEOMETRY] * LAYERS, SCHEMES, mx.float32)
        self.caches = make_caches(self.store)
        self.untouched = [self._row(UNTOUCHED_TOKENS) for _ in range(UNTOUCHED)]
        self.lowered = [self._row(tokens) for _ in range(rows)]
        self.rows = self.untouched + self.lowered
        self.store.pages.compact()
        self.keys = mx.random.key(2)
        mx.eval(self.keys)
        mx.clear_cache()

    def _row(self, tokens: int) -> Row:
        row = self.store.new_row()
        for start in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - start)
            self.store.begin_prefill(row, count)
            for cache in self.caches:
                shape = (1, GEOMETRY.kv_heads, count, GEOMETRY.k_dim)
                cache.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
            self.store.finish_prefill()
        return row

    def step(self) -> np.ndarray:
        """Decode one token of every row; return the outputs of the rows that are left alone."""
        if self.store.needs_flush(self.rows):
            self.store.flush()
        self.keys, mine = mx.random.split(self.keys)
        self.store.begin_decode(self.rows)
        outputs = []
        for cache, key in zip(self.caches, mx.random.split(mine, LAYERS), strict=True):
            a, b = mx.random.split(key)
            token = mx.random.normal((len(self.rows), GEOMETRY.kv_heads, 1, GEOMETRY.k_dim), key=a)
            queries = mx.random.normal((len(self.rows), QUERY_HEADS, 1, GEOMETRY.k_dim), key=b)
            handle, _ = cache.update_and_fetch(token, token)
            outputs.append(decode_attention(queries, handle, GEOMETRY.k_dim**-0.5))
        mx.eval(outputs, self.store.arrays())
        return np.stack([np.array(output[:UNTOUCHED]) for output in outputs])

    def run(self, steps: int, down: StepDown | None = None) -> Steps:
        """Decode at least ``steps`` steps, and until ``down`` and two later flushes are done."""
        seen = Steps()
        mx.reset_peak_memory()
        while len(seen.seconds) < steps or not self._settled(down, seen):
            start, cpu = time.perf_counter(), time.process_time()
            output = self.step()
            if down is not None:
                before = time.perf_counter()
                if down.over:
                    make_room(self.store, SLICE_S, time.perf_counter)
                else:
                    down.advance(SLICE_S, time.perf_counter)
                seen.slices.append(time.perf_counter() - before)
            seen.seconds.append(time.perf_counter() - start)
            seen.cpu.append(time.process_time() - cpu)
            seen.outputs.append(output)
            seen.peak = max(seen.peak, mx.get_peak_memory())
            seen.footprint = max(seen.footprint, mx.get_active_memory() + mx.get_cache_memory())
        return seen

    def _settled(self, down: StepDown | None, seen: Steps) -> bool:
        """Return whether the step-down and two later flushes are done, if there is a step-down.

        Flushes are awaited because they find pools that the step-down has shrunk.
        """
        if down is None or not down.over:
            return down is None
        if seen.bytes_after is None:
            seen.bytes_after = self.store.nbytes
            seen.bytes_formula = self._formula()
            seen.flushes = self.store.flushes
        return self.store.flushes > seen.flushes + 1

    def _formula(self) -> int:
        """Return the bytes of all tails, and of all pages at the levels that they should have."""
        store = self.store
        lowered, kept = (
            sum(len(row.held) for row in ones) for ones in (self.lowered, self.untouched)
        )
        pages = lowered * store.pages.page_bytes(TARGET) + kept * store.pages.page_bytes()
        return pages + store.tails.nbytes


def measure(rows: int, tokens: int, scratch: int) -> dict[str, Any]:
    """Step rows down, then decode as many steps without a step-down; return the comparison."""
    batch = Batch(rows, tokens)
    store = batch.store
    batch.run(WARM_UP)
    steady = batch.run(STEADY_STEPS)
    before = store.nbytes
    down = StepDown(store, batch.lowered, TARGET, scratch=scratch)
    work = batch.run(1, down)
    mx.clear_cache()
    del batch, store, down
    mx.clear_cache()

    twin = Batch(rows, tokens)
    twin.run(WARM_UP + STEADY_STEPS)
    alone = twin.run(len(work.seconds))
    same = all(np.array_equal(a, b) for a, b in zip(work.outputs, alone.outputs, strict=True))
    finite = all(np.isfinite(one).all() for one in work.outputs)
    median = statistics.median(steady.seconds)
    return {
        "rows": rows,
        "tokens": tokens,
        "layers": LAYERS,
        "geometry": {"kv_heads": GEOMETRY.kv_heads, "head_dim": GEOMETRY.k_dim, "bytes": 4},
        "schemes": [scheme.name for scheme in SCHEMES],
        "scratch_bytes": scratch,
        "slice_s": SLICE_S,
        "steps": len(work.seconds),
        "median_step_s": median,
        "longest_step_before_s": max(steady.seconds),
        "longest_step_s": max(work.seconds),
        "longest_ratio": max(work.seconds) / median,
        "longest_step_without_s": max(alone.seconds),
        "longest_cpu_ratio": max(work.cpu) / statistics.median(steady.cpu),
        "longest_cpu_ratio_without": max(alone.cpu) / statistics.median(steady.cpu),
        "longest_slice_s": max(work.slices),
        "median_slice_s": statistics.median(work.slices),
        "bytes_before": before,
        "bytes_after": work.bytes_after,
        "bytes_formula": work.bytes_formula,
        "peak_before": steady.peak,
        "peak_during": work.peak,
        "peak_over_before": work.peak - steady.peak,
        "footprint_before": steady.footprint,
        "footprint_during": work.footprint,
        "untouched_rows_same_to_the_bit": same and finite,
    }


def main() -> None:
    """Measure, print the result, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--scratch-mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.rows, arguments.tokens, arguments.scratch_mib * MIB)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
