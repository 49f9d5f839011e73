r"""Upper bound of what a fused kernel could save in prefill, on an accelerator.

    python -m bench.tile [--json FILE]

Prefill attention unpacks a layer's pages and calls MLX's dense attention. A fused kernel would
unpack each tile of keys when it multiplies it. At best it would save the time of unpacking, if it
were otherwise as fast as the dense kernel. Unpacking and dense attention are timed separately, for
one row, heads of 128 and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx

RUNS = 8
DIM = 128
PAGE = 64


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median milliseconds of `RUNS` calls, after an untimed one."""
    mx.eval(call())
    mx.synchronize()
    seen = []
    for _ in range(RUNS):
        start = time.perf_counter()
        mx.eval(call())
        mx.synchronize()
        seen.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seen)


def measure(
    heads: int, kv_heads: int, bits: int, keys: int, chunks: list[int]
) -> list[dict[str, Any]]:
    """Time unpacking and dense attention for a row of ``keys`` keys and each chunk length."""
    shape = (keys // PAGE, kv_heads, DIM, PAGE)
    packed_keys = mx.quantize(mx.random.normal(shape).astype(mx.bfloat16), PAGE, bits)
    values = mx.random.normal((*shape[:2], PAGE, DIM)).astype(mx.bfloat16)
    packed_values = mx.quantize(values, PAGE, bits)
    mx.eval(packed_keys, packed_values)

    def unpack() -> tuple[mx.array, mx.array]:
        dense = mx.dequantize(*packed_keys, PAGE, bits).swapaxes(-1, -2)
        sides = (dense, mx.dequantize(*packed_values, PAGE, bits))
        k, v = (one.swapaxes(0, 1).reshape(1, kv_heads, keys, DIM) for one in sides)
        return k, v

    k, v = unpack()
    mx.eval(k, v)
    found = []
    for chunk in chunks:
        queries = mx.random.normal((1, heads, chunk, DIM)).astype(mx.bfloat16)
        mx.eval(queries)

        def attend(queries: mx.array = queries) -> mx.array:
            return mx.fast.scaled_dot_product_attention(
                queries, k, v, scale=DIM**-0.5, mask="causal"
            )

        found.append({
            "heads": heads,
            "kv_heads": kv_heads,
            "bits": bits,
            "keys": keys,
            "chunk": chunk,
            "unpack_ms": round(milliseconds(unpack), 3),
            "sdpa_ms": round(milliseconds(attend), 3),
        })  # fmt: skip
    return found


def main() -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.tile", description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for (heads, kv_heads), bits, keys in product(((16, 8), (32, 8)), (8, 4), options.keys):
        rows = measure(heads, kv_heads, bits, keys, options.chunks)
        for row in rows:
            share = row["unpack_ms"] / (row["unpack_ms"] + row["sdpa_ms"])
            print(json.dumps(row), f"unpacking {share:.0%}")
        found += rows
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
