"""Cost of tiles: the attention of one chunk over a long context, in tiles and in one call.

    python -m bench.prefill [--contexts 4096 16384 65536] [--json FILE]

There is one layer with K8V8 pages, and a chunk of 256 tokens. "Untiled" is one call of the dense
kernel with unlimited scratch; "tiled" is the same chunk with limited scratch. The two alternate,
and times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

import mlx.core as mx

from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.batch import PrefillHandle, make_caches
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore

GEOMETRY = LayerGeometry(kv_heads=2, k_dim=64, v_dim=64)
REPEATS = 2
CHUNK = 256
CONTEXTS = (4096, 16384, 65536)
SCRATCHES = (4 << 20, 16 << 20, 64 << 20)
UNLIMITED = 1 << 40
ROUNDS = 5


@dataclass
class Result:
    """Measurements with one context length and one limit of scratch bytes."""

    context: int
    scratch: int
    ms: float
    untiled_ms: float
    ratio: float
    """Ratio of the times; above 1, tiles are slower."""
    peak_bytes: int
    """Peak memory above that before the call, without the output."""
    untiled_peak_bytes: int


class Case:
    """A chunk in prefill, after a context of random keys and values."""

    def __init__(self, context: int) -> None:
        self.context = context
        self._store = KVStore([GEOMETRY], Scheme(8, 8), mx.float32)
        (self._cache,) = make_caches(self._store)
        self._row = self._store.new_row()
        for _ in range(0, context, 1024):
            self._extend(1024)
            self._store.finish_prefill()
        self._handle = self._extend(CHUNK)
        heads = GEOMETRY.kv_heads * REPEATS
        self._queries = mx.random.normal((1, heads, CHUNK, GEOMETRY.k_dim))
        mx.eval(self._queries, self._store.arrays())

    def _extend(self, count: int) -> PrefillHandle:
        self._store.begin_prefill(self._row, count)
        shape = (1, GEOMETRY.kv_heads, count, GEOMETRY.k_dim)
        handle, _ = self._cache.update_and_fetch(*(mx.random.normal(shape) for _ in range(2)))
        assert isinstance(handle, PrefillHandle)
        return handle

    def run(self, scratch: int) -> tuple[float, int]:
        """Return milliseconds and peak bytes."""
        self._store.scratch.limit = scratch
        self._store.scratch.add(scratch)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        output = prefill_attention(self._queries, self._handle, GEOMETRY.k_dim**-0.5)
        mx.eval(output)
        mx.synchronize()
        ms = (time.perf_counter() - start) * 1e3
        return ms, mx.get_peak_memory() - before - output.nbytes

    def compare(self, scratch: int) -> Result:
        """Time the chunk tiled and untiled, in alternation."""
        tiled, untiled = [], []
        for _ in range(ROUNDS):
            tiled.append(self.run(scratch))
            untiled.append(self.run(UNLIMITED))
        ms, untiled_ms = (statistics.median(one[0] for one in runs) for runs in (tiled, untiled))
        return Result(
            self.context,
            scratch,
            ms,
            untiled_ms,
            ms / untiled_ms,
            max(one[1] for one in tiled),
            max(one[1] for one in untiled),
        )


def main() -> None:
    """Compare at every context and scratch, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for context in arguments.contexts:
        case = Case(context)
        for scratch in SCRATCHES:
            one = case.compare(scratch)
            results.append(one)
            print(
                f"{context:6} tokens  scratch {scratch >> 20:3} MiB  {one.ms:7.1f} ms"
                f"  untiled {one.untiled_ms:7.1f} ms  ratio {one.ratio:.2f}"
                f"  peak {one.peak_bytes / 1e6:6.1f} MB  untiled {one.untiled_peak_bytes / 1e6:.1f}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
