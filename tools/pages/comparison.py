"""Tables of the comparison with mlx-lm, from the committed results: a full and a short one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from tools.pages.markdown import table

README, PAGE = "README.md", "docs/performance.md"
RESULTS = Path(__file__).parents[2] / "bench" / "results"
Read = Callable[[Any, str], float]
"""Reads one number of a side, ``kvd`` or ``mlx-lm``, from a result file's content."""
RATE, MS = "{:.0f} tok/s", "{:.0f} ms"
CPU, GPU = "serve-linux-cpu", "serve-h200-qwen3-0.6b"


@dataclass(frozen=True)
class Comparison:
    """One quantity that was measured on both sides."""

    text: str
    result: str
    """Name of the result file."""
    read: Read
    shown: str
    more_is_better: bool = False
    in_readme: bool = False


def _served(trace: str, measure: str, scale: float = 1.0) -> Read:
    """Return a reader of a median over the runs of a `bench.serve` trace."""
    sides = {"kvd": "kvd k8v8", "mlx-lm": "mlx-lm"}
    return lambda found, side: scale * found["traces"][trace][sides[side]]["median"][measure]


def _rows_bytes(found: Any, side: str) -> float:
    name = {"kvd": "kvd k8v8", "mlx-lm": "mlx-lm BatchKVCache"}[side]
    return next(one["bytes"] for one in found["equal"] if one["cache"] == name) / 1e6


def _engine(part: str, tokens: int, measure: str, scale: float = 1.0) -> Read:
    """Return a reader of an engine loop's median in `bench.gpu`, without a server around it."""
    loops = {"kvd": "kvd k8v8", "mlx-lm": "mlx-lm BatchGenerator"}

    def read(found: Any, side: str) -> float:
        runs = [
            one[measure]
            for one in found[part]
            if (one["loop"], one["tokens"]) == (loops[side], tokens)
            and one.get("attention") in {None, "fused"}
        ]
        return scale * float(median(runs))

    return read


COMPARISONS = (
    Comparison(
        "8 streams at once", CPU, _served("steady", "tok_s"), RATE, more_is_better=True,
        in_readme=True,
    ),
    Comparison("time to their first tokens, p99", CPU, _served("steady", "ttft_p99", 1e3), MS),
    Comparison("time between their tokens, p99", CPU, _served("steady", "itl_p99", 1e3), MS),
    Comparison(
        "32 prompts with a common beginning", CPU, _served("shared", "tok_s"), RATE,
        more_is_better=True,
    ),
    Comparison(
        "time between tokens of 7 streams during a 6000-token prefill, p99", CPU,
        _served("long", "during_p99", 1e3), MS, in_readme=True,
    ),
    Comparison(
        "peak memory, one 4000-token prompt among eleven short ones", CPU,
        _served("unequal", "peak_bytes", 1e-6), "{:.0f} MB", in_readme=True,
    ),
    Comparison("KV cache of 8 rows of 2048 tokens", "kv-linux-cpu", _rows_bytes, "{:.1f} MB"),
    Comparison("8 streams at once", GPU, _served("steady", "tok_s"), RATE, more_is_better=True),
    Comparison(
        "32 prompts with a common beginning", GPU, _served("shared", "tok_s"), RATE,
        more_is_better=True,
    ),
    Comparison(
        "7 streams and one long prompt", GPU, _served("long", "tok_s"), RATE, more_is_better=True,
        in_readme=True,
    ),
    Comparison(
        "engine loop without a server, 8 rows of 4096 tokens", "gpu-h200-qwen3-0.6b-fused",
        _engine("decode", 4096, "tok_s"), RATE, more_is_better=True, in_readme=True,
    ),
    Comparison(
        "engine loop, 8 rows of 4096 tokens, Qwen3-8B's shape", "gpu-h200-qwen3-8b-fused",
        _engine("decode", 4096, "tok_s"), RATE, more_is_better=True,
    ),
    Comparison(
        "peak memory above the weights, 50,000-token prompt", "gpu-h200-qwen3-0.6b-fused",
        _engine("prefill", 50_000, "peak_over_weights", 1e-9), "{:.1f} GB",
    ),
)  # fmt: skip


def readme_parts() -> dict[str, str]:
    """Return the generated part of README: the rows marked `in_readme`."""
    return {"comparison": _table([one for one in COMPARISONS if one.in_readme], "bench/results")}


def parts() -> dict[str, str]:
    """Return the generated part of docs/performance.md: all rows."""
    return {"comparison": _table(COMPARISONS, "../bench/results")}


def _table(comparisons: Iterable[Comparison], folder: str) -> str:
    rows = [_row(comparison, folder) for comparison in comparisons]
    return table(("", "kvd, K8V8", "mlx-lm", "machine"), rows)


def _row(comparison: Comparison, folder: str) -> tuple[str, ...]:
    found = _result(comparison.result)
    values = [comparison.read(found, side) for side in ("kvd", "mlx-lm")]
    cells = [comparison.shown.format(value).replace(" ", "\u00a0") for value in values]
    better = 0 if (values[0] > values[1]) == comparison.more_is_better else 1
    cells[better] = f"**{cells[better]}**"
    machine = "H200" if "h200" in comparison.result else "2\u00a0cores"
    return (comparison.text, *cells, f"[{machine}]({folder}/{comparison.result}.json)")


@cache
def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
