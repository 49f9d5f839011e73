"""Time kvd's kernel for chunks of a prefill pass and MLX's dense attention, on CUDA.

    python -m bench.gpu.chunks [--json FILE]

One chunk of a row, bfloat16, heads of 128. The kernel reads tokens before the chunk from a copy,
as in a pass. MLX's attention (cuDNN) gets all keys in one array, which a pass would have to make.
Both products of the kernel are timed: those of single warps and, on Hopper, of groups of warps.
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

from kvd.worker.artifacts import modules
from kvd.worker.attention.chunk_tiles import ChunkPlaces
from kvd.worker.attention.kernels.arguments import Attend, TileSplits, Tiling
from kvd.worker.attention.kernels.fused import Fused, has_group_products
from kvd.worker.attention.kernels.language import CUDA

DIM = 128
CALLS, ROUNDS = 10, 5
CASES = (
    (16, 8, 200, 0),
    (16, 8, 1024, 0),
    (16, 8, 4096, 0),
    (16, 8, 64, 6016),
    (16, 8, 1024, 15_360),
    (32, 8, 1024, 15_360),
    (16, 8, 1024, 49_088),
    (16, 8, 40, 4096),
    (16, 8, 40, 15_360),
    (16, 8, 224, 99_776),
    (32, 8, 40, 15_360),
    (32, 8, 224, 99_776),
)
"""Query heads, KV heads, tokens of the chunk, and tokens before it."""


def milliseconds(call: Callable[[], mx.array]) -> float:
    """Return the median milliseconds of a call; several are evaluated together."""
    mx.eval([call() for _ in range(3)])
    seen = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mx.eval([call() for _ in range(CALLS)])
        seen.append((time.perf_counter() - start) / CALLS)
    return 1e3 * statistics.median(seen)


def measure(q_heads: int, kv_heads: int, count: int, before: int) -> dict[str, Any]:
    """Time one case. ``error``: the largest difference of a result, relative to the largest one."""

    def noise(tokens: int, heads: int) -> mx.array:
        return mx.random.normal((max(1, tokens), heads, DIM)).astype(mx.bfloat16)

    queries, keys, values = noise(count, q_heads), noise(count, kv_heads), noise(count, kv_heads)
    copies = noise(before, kv_heads), noise(before, kv_heads)
    q, k, v = (
        mx.contiguous(mx.concatenate(parts).swapaxes(0, 1)[None])
        for parts in ([queries], [copies[0][:before], keys], [copies[1][:before], values])
    )
    mx.eval(queries, keys, values, copies, q, k, v)
    scale = DIM**-0.5
    work = 4 * q_heads * DIM * (count * before + count * count / 2)

    def dense() -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")

    wanted = dense()[0].swapaxes(0, 1).flatten(1)
    found: dict[str, Any] = {
        "query_heads": q_heads, "kv_heads": kv_heads, "tokens": count, "before": before,
        "mlx": _about(milliseconds(dense), work),
    }  # fmt: skip
    for warpgroups in [False, *([True] if has_group_products() else [])]:
        tiling = Tiling((128 if warpgroups else 64) // (q_heads // kv_heads), warpgroups, kv_heads)
        for splits in sorted({1, tiling.splits(count, before)}):
            entry = -1 if splits == 1 else 0
            chunk = ChunkPlaces(0, 0, count, 0, 0, before, entry=entry)
            tiles = sorted(chunk.tiles(tiling.tokens, splits), key=lambda tile: -tile[3])
            rows = [(*[0] * 6, token * splits, (token + 1) * splits) for token in range(count)]
            given = Attend(
                queries, keys, values, *copies, mx.array([1], mx.int32),
                mx.array(tiles, mx.int32),
                None if splits == 1 else TileSplits(count * splits, mx.array(rows, mx.int32)),
                count, scale, warpgroups,
            )  # fmt: skip

            def attend(given: Attend = given) -> mx.array:
                return Fused(CUDA).attend(given)

            error = mx.abs(attend() - wanted).max() / mx.abs(wanted).max()
            name = "groups of warps" if warpgroups else "warps"
            name += "" if splits == 1 else f", {splits} splits"
            found[name] = {**_about(milliseconds(attend), work), "error": round(error.item(), 5)}
    return found


def _about(ms: float, work: float) -> dict[str, float]:
    return {"ms": round(ms, 3), "tflops": round(work / ms / 1e9)}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write all cases."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.chunks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not mx.cuda.is_available():
        print("the kernel runs on CUDA only, and MLX has no CUDA device here", file=sys.stderr)
        return 2
    modules.activate(lambda *_: None)
    cases = [measure(*case) for case in CASES]
    for case in cases:
        print(json.dumps(case))
    if options.json is not None:
        options.json.write_text(json.dumps(cases, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
