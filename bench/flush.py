"""Time of a flush into a pool of 2 MB and into one of 0.5 GB, in alternation.

    python -m bench.flush [--json FILE]

There is one layer. Each round launches decode steps until rows have a page to write, waits for the
steps, and times the flush alone. If a flush copied the pool that it writes into, the large pool
would take hundreds of times longer, and peak memory would rise by the pool's size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.batch import make_caches
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore

GEOMETRY = LayerGeometry(kv_heads=8, k_dim=128, v_dim=128)
ROWS = 2
ROUNDS = 15


@dataclass
class Result:
    """Measurements of one pool."""

    pool_bytes: int
    flush_ms: float
    """Median over the rounds."""
    step_ms: float
    peak_over_steady_bytes: int


class Pool:
    """Two short rows in a pool of a given size."""

    def __init__(self, pool_bytes: int) -> None:
        self.store = KVStore([GEOMETRY], Scheme(8, 8), mx.float32)
        (self.cache,) = make_caches(self.store)
        pages = max(8, pool_bytes // self.store.pages.page_bytes())
        self.store.pages.allocators[0].grow(pages)
        self.store.layers[0].pools[0].grow(pages)
        self.rows = [self._row() for _ in range(ROWS)]
        self.queries = mx.random.normal((ROWS, 16, 1, 128))
        self.token = mx.random.normal((ROWS, 8, 1, 128))
        mx.eval(self.queries, self.token)
        mx.clear_cache()
        mx.reset_peak_memory()
        self.steady = mx.get_active_memory()
        self.flushes: list[float] = []
        self.steps: list[float] = []

    def _row(self) -> Row:
        row = self.store.new_row()
        self.store.begin_prefill(row, 100)
        self.cache.update_and_fetch(*(mx.random.normal((1, 8, 100, 128)) for _ in range(2)))
        self.store.finish_prefill()
        return row

    def step(self) -> None:
        """Launch a decode step without waiting for it."""
        self.store.begin_decode(self.rows)
        handle, _ = self.cache.update_and_fetch(self.token, self.token)
        mx.async_eval(decode_attention(self.queries, handle, 0.1), self.store.arrays())

    def round(self) -> None:
        """Decode until a row needs a page to be written, then flush; record both times."""
        start = time.perf_counter()
        steps = 0
        while not self.store.needs_flush(self.rows):
            self.step()
            steps += 1
        mx.eval(self.store.arrays())
        mx.synchronize()
        drained = time.perf_counter()
        self.store.flush()
        done = time.perf_counter()
        self.steps.append((drained - start) / max(1, steps) * 1e3)
        self.flushes.append((done - drained) * 1e3)
        for row in self.rows:  # back to their first length, so that every round is the same
            self.store.pages.release_written_ahead(row)
            row.length = PAGE_TOKENS

    def result(self) -> Result:
        """Return the medians."""
        return Result(
            pool_bytes=self.store.pages.nbytes,
            flush_ms=statistics.median(self.flushes),
            step_ms=statistics.median(self.steps),
            peak_over_steady_bytes=mx.get_peak_memory() - self.steady,
        )


def main() -> None:
    """Run both pools, alternating, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    small = Pool(2_000_000)
    large = Pool(500_000_000)
    for _ in range(ROUNDS):
        small.round()
        large.round()
    results = {"small": small.result(), "large": large.result()}
    ratio = results["large"].flush_ms / results["small"].flush_ms
    for name, result in results.items():
        print(
            f"{name}: pool {result.pool_bytes / 1e6:8.1f} MB  flush {result.flush_ms:6.2f} ms"
            f"  step {result.step_ms:5.2f} ms"
        )
    over = results["large"].peak_over_steady_bytes
    print(f"flush ratio {ratio:.2f}; peak over steady state {over / 1e6:.1f} MB")
    if arguments.json:
        out = {"ratio": ratio, **{name: asdict(result) for name, result in results.items()}}
        arguments.json.write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
