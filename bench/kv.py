"""Compares kvd's KV cache with mlx-lm's: bytes, attention time by length, time to add a row.

    python -m bench.kv [--json FILE] [--plot FILE] [--quick]

* Memory: bytes per token of the pools' arrays, relative to fp16, for each scheme and dtype.
* Linearity: median time of one row's decode attention at 1K to 32K tokens, and a linear fit's r2.
* Side by side: steps of a batch of equally long rows, and of a batch of very unequal ones. The
  caches alternate in one process: kvd's pages, mlx-lm's BatchKVCache, and for equally long rows
  its QuantizedKVCache, which has no batched form. A step appends one token to each row, attends and
  evaluates. Afterwards a row is added to each batch; its time and peak memory are measured.

Everything is one layer of random float32 keys and values, so no time is a model's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.batch import make_caches
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore

HEADS, KV_HEADS, DIM = 8, 4, 128
SCALE = DIM**-0.5
CHUNK = 1024
LIMITS = {"k8v8": 0.54, "k8v4": 0.41, "k4v4": 0.29}
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
EQUAL = (2048,) * 8
UNEQUAL = (16384,) + (512,) * 7
JOINER = 512


def draw_pair(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    """Return random keys and values."""
    shape = (rows, KV_HEADS, tokens, DIM)
    pair = mx.random.normal(shape), mx.random.normal(shape)
    mx.eval(pair)
    return pair


class Ours:
    """Rows in kvd's pages."""

    def __init__(self, lengths: tuple[int, ...], scheme: Scheme) -> None:
        self.name = f"kvd {scheme.name}"
        self.store = KVStore([LayerGeometry(KV_HEADS, DIM, DIM)], scheme, mx.float32)
        (self.cache,) = make_caches(self.store)
        self.rows = [self.row(length) for length in lengths]
        self.store.pages.compact()

    def row(self, tokens: int) -> Row:
        """Prefill one more row."""
        row = self.store.new_row()
        for start in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - start)
            self.store.begin_prefill(row, count)
            self.cache.update_and_fetch(*draw_pair(1, count))
            self.store.finish_prefill()
        return row

    def step(self, queries: mx.array, token: tuple[mx.array, mx.array]) -> None:
        """Append a token to each row, and attend."""
        if self.store.needs_flush(self.rows):
            self.store.flush()
        self.store.begin_decode(self.rows)
        handle, _ = self.cache.update_and_fetch(*token)
        mx.eval(decode_attention(queries, handle, SCALE), self.store.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.store.nbytes

    def join(self) -> None:
        """Add a row. Prefill writes its pages into the pools, so nothing has to be merged."""
        self.rows.append(self.row(JOINER))


class Quantized:
    """Rows of equal length in mlx-lm's QuantizedKVCache."""

    def __init__(self, lengths: tuple[int, ...], bits: int) -> None:
        self.name = f"mlx-lm QuantizedKVCache {bits} bits"
        self.bits = bits
        self.cache = QuantizedKVCache(group_size=64, bits=bits)
        for start in range(0, lengths[0], CHUNK):
            count = min(CHUNK, lengths[0] - start)
            self.cache.update_and_fetch(*draw_pair(len(lengths), count))
            mx.eval(self.cache.state[:2])

    def step(self, queries: mx.array, token: tuple[mx.array, mx.array]) -> None:
        """Append a token to each row, and attend."""
        keys, values = self.cache.update_and_fetch(*token)
        mx.eval(
            quantized_scaled_dot_product_attention(
                queries, keys, values, SCALE, None, group_size=64, bits=self.bits
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.cache.nbytes)


class Batched:
    """Rows of any length in mlx-lm's BatchKVCache, created as its BatchGenerator does."""

    name = "mlx-lm BatchKVCache"

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.cache = KVCache.merge([self.single(length) for length in lengths])
        mx.eval(self.cache.keys, self.cache.values)

    def single(self, tokens: int) -> KVCache:
        """Prefill one row in its own cache."""
        cache = KVCache()
        for start in range(0, tokens, CHUNK):
            cache.update_and_fetch(*draw_pair(1, min(CHUNK, tokens - start)))
            mx.eval(cache.keys, cache.values)
        return cache

    def step(self, queries: mx.array, token: tuple[mx.array, mx.array]) -> None:
        """Append a token to each row, and attend."""
        mask = self.cache.make_mask(1)
        keys, values = self.cache.update_and_fetch(*token)
        mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.cache.nbytes)

    def join(self) -> None:
        """Add a row: prefill it in its own cache, then merge."""
        self.cache.extend(BatchKVCache.merge([self.single(JOINER)]))
        mx.eval(self.cache.keys, self.cache.values)


Held = Ours | Quantized | Batched


def memory() -> list[dict[str, Any]]:
    """Return bytes per token of a pool, relative to fp16, by scheme and dtype of the scales."""
    found = []
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        for name in LIMITS:
            geometry = LayerGeometry(KV_HEADS, DIM, DIM, dtype.size)
            pool = PagePool(geometry, Scheme.parse(name), dtype)
            pool.grow(16)
            held = sum(array.nbytes for array in pool.arrays()) / (16 * 64)
            share = held / (KV_HEADS * DIM * 2 * 2)
            found.append({
                "scheme": name, "dtype": str(dtype).removeprefix("mlx.core."),
                "bytes_per_token": held, "share_of_fp16": share,
            })  # fmt: skip
    return found


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def linearity(lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Time the attention of one row at each length, in alternation; fit a line."""
    held = [Ours((length,), Scheme(8, 8)) for length in lengths]
    queries, token = mx.random.normal((1, HEADS, 1, DIM)), draw_pair(1, 1)
    seconds: list[list[float]] = [[] for _ in held]
    for run_number in range(rounds + 1):
        for one, mine in zip(held, seconds, strict=True):
            taken = timed(lambda one=one: one.step(queries, token))
            if run_number:
                mine.append(taken)
    medians = [statistics.median(mine) * 1e3 for mine in seconds]
    slope, intercept = np.polyfit(lengths, medians, 1)
    rest = np.array(medians) - (slope * np.array(lengths) + intercept)
    spread = np.array(medians) - np.mean(medians)
    return {
        "lengths": list(lengths),
        "attend_ms": medians,
        "ms_per_1k_tokens": float(slope * 1024),
        "r2": float(1 - (rest**2).sum() / (spread**2).sum()),
    }


def side_by_side(lengths: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Time steps of the caches in alternation; then time adding a row."""
    makers: list[Callable[[], Held]] = [
        lambda: Ours(lengths, Scheme(8, 8)),
        lambda: Ours(lengths, Scheme(4, 4)),
        lambda: Batched(lengths),
    ]
    if len(set(lengths)) == 1:
        makers += [lambda: Quantized(lengths, 8), lambda: Quantized(lengths, 4)]
    held = [make() for make in makers]
    batch = len(lengths)
    queries, token = mx.random.normal((batch, HEADS, 1, DIM)), draw_pair(batch, 1)
    seconds: dict[str, list[float]] = {one.name: [] for one in held}
    for run_number in range(rounds + 1):
        for one in held:
            taken = timed(lambda one=one: one.step(queries * 1, token))
            if run_number:
                seconds[one.name].append(taken)
    found = []
    dense = next(one for one in held if isinstance(one, Batched)).nbytes
    slowest = statistics.median(seconds[Batched.name])
    for one in held:
        median = statistics.median(seconds[one.name])
        found.append({
            "cache": one.name, "bytes": one.nbytes, "share_of_batch_kv_cache": one.nbytes / dense,
            "step_ms": median * 1e3, "step_over_batch_kv_cache": median / slowest,
        })  # fmt: skip
    for index, one in enumerate(held):
        if not isinstance(one, Quantized):
            found[index] |= _join(one)
    return found


def _join(one: Ours | Batched) -> dict[str, Any]:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    seconds = timed(one.join)
    return {"join_ms": seconds * 1e3, "join_peak_over_before": mx.get_peak_memory() - before}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        names,
        ["---"] * len(names),
        *([_cell(row.get(name)) for name in names] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "" if value is None else str(value)


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot time against length, and the bytes of the two batches."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    line = result["linearity"]
    left.plot(line["lengths"], line["attend_ms"], "o-")
    left.set(title=f"K8V8 attention, r2 {line['r2']:.4f}", xlabel="tokens", ylabel="ms")
    for offset, batch in ((-0.2, "equal"), (0.2, "unequal")):
        rows = result[batch][:3]
        places = [index + offset for index in range(len(rows))]
        right.bar(places, [row["bytes"] / 1e6 for row in rows], 0.4, label=batch)
        right.set_xticks(range(len(rows)), [row["cache"] for row in rows])
    right.set(title="Bytes of eight rows, one layer", ylabel="MB")
    right.legend()
    figure.savefig(file, dpi=110)


def measure(*, quick: bool) -> dict[str, Any]:
    """Run all measurements; ``quick`` uses short lengths, only to see that they run."""
    mx.random.seed(0)
    rounds = 3 if quick else 9
    result: dict[str, Any] = {
        "command": "python -m bench.kv " + " ".join(sys.argv[1:]),
        "geometry": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "layers": 1},
        "device": str(mx.default_device()),
        "memory": memory(),
        "linearity": linearity((256, 512, 1024) if quick else LENGTHS, rounds),
    }
    mx.clear_cache()
    result["equal"] = side_by_side((256,) * 4 if quick else EQUAL, rounds)
    mx.clear_cache()
    result["unequal"] = side_by_side((2048, 128, 128) if quick else UNEQUAL, rounds)
    return result


def main() -> None:
    """Measure, print the tables, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    result = measure(quick=arguments.quick)
    line = result["linearity"]
    times = zip(line["lengths"], line["attend_ms"], strict=True)
    print(table(result["memory"]), "\n")
    print(table([{"tokens": tokens, "attend_ms": ms} for tokens, ms in times]))
    print(f"\nr2 {line['r2']:.5f}, {line['ms_per_1k_tokens']:.2f} ms per 1K tokens\n")
    for batch in ("equal", "unequal"):
        print(f"{batch}\n\n{table(result[batch])}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        draw(result, arguments.plot)


if __name__ == "__main__":
    main()
