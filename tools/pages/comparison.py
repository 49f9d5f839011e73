"""README's comparison: numbers of kvd and of mlx-lm, from the committed results alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from tools.pages.markdown import table

PAGE = "README.md"
RESULTS = Path(__file__).parents[2] / "bench" / "results"
Take = Callable[[Any, str], float]
"""A number from a file's content, of a side: ``kvd`` or ``mlx-lm``."""
RATE = "{:.0f} tok/s"
CPU, GPU = "serve-linux-cpu", "serve-h200-qwen3-0.6b"


@dataclass(frozen=True)
class Line:
    """One thing that was measured on both sides."""

    text: str
    result: str
    """The file's name."""
    take: Take
    shown: str
    more_is_better: bool = False


def _served(trace: str, measure: str, scale: float = 1.0) -> Take:
    """Of a trace of `bench.serve`, medians of its runs."""
    sides = {"kvd": "kvd k8v8", "mlx-lm": "mlx-lm"}
    return lambda found, side: scale * found["traces"][trace][sides[side]]["median"][measure]


def _rows_bytes(found: Any, side: str) -> float:
    name = {"kvd": "kvd k8v8", "mlx-lm": "mlx-lm BatchKVCache"}[side]
    return next(one["bytes"] for one in found["equal"] if one["cache"] == name) / 1e6


def _engine(part: str, tokens: int, measure: str, scale: float = 1.0) -> Take:
    """Of the loops that `bench.gpu` times, without a server around them."""
    loops = {"kvd": "kvd k8v8", "mlx-lm": "mlx-lm BatchGenerator"}

    def take(found: Any, side: str) -> float:
        runs = [
            one[measure]
            for one in found[part]
            if (one["loop"], one["tokens"]) == (loops[side], tokens)
            and one.get("attention") in {None, "fused"}
        ]
        return scale * float(median(runs))

    return take


LINES = (
    Line("8 streams at once", CPU, _served("steady", "tok_s"), RATE, True),
    Line("their first tokens, p99", CPU, _served("steady", "ttft_p99", 1e3), "{:.0f} ms"),
    Line("their gaps, p99", CPU, _served("steady", "itl_p99", 1e3), "{:.0f} ms"),
    Line("32 prompts that begin alike", CPU, _served("shared", "tok_s"), RATE, True),
    Line(
        "gaps of 7 streams while a prompt of 6000 tokens is read, p99",
        CPU,
        _served("long", "during_p99", 1e3),
        "{:.0f} ms",
    ),
    Line(
        "memory with a prompt of 4000 tokens among eleven short ones",
        CPU,
        _served("unequal", "peak_bytes", 1e-6),
        "{:.0f} MB",
    ),
    Line("KV of 8 rows of 2048 tokens", "kv-linux-cpu", _rows_bytes, "{:.1f} MB"),
    Line("8 streams at once", GPU, _served("steady", "tok_s"), RATE, True),
    Line("32 prompts that begin alike", GPU, _served("shared", "tok_s"), RATE, True),
    Line("7 streams and a long prompt", GPU, _served("long", "tok_s"), RATE, True),
    Line(
        "the engine's loop alone, 8 rows of 4096 tokens",
        "gpu-h200-qwen3-0.6b-fused",
        _engine("decode", 4096, "tok_s"),
        RATE,
        True,
    ),
    Line(
        "the same in Qwen3-8B's shape",
        "gpu-h200-qwen3-8b-fused",
        _engine("decode", 4096, "tok_s"),
        RATE,
        True,
    ),
    Line(
        "memory above the weights, a prompt of 50 000 tokens",
        "gpu-h200-qwen3-0.6b-fused",
        _engine("prefill", 50_000, "peak_over_weights", 1e-9),
        "{:.1f} GB",
    ),
)


def parts() -> dict[str, str]:
    """Return all generated parts by name."""
    rows = [_row(line) for line in LINES]
    return {"comparison": table(("", "kvd, K8V8", "mlx-lm", "on"), rows)}


def _row(line: Line) -> tuple[str, ...]:
    found = _result(line.result)
    ours, theirs = (line.take(found, side) for side in ("kvd", "mlx-lm"))
    wins = (ours > theirs) == line.more_is_better
    said = [line.shown.format(value).replace(" ", "\u00a0") for value in (ours, theirs)]
    said[0 if wins else 1] = f"**{said[0 if wins else 1]}**"
    machine = "H200" if "h200" in line.result else "2\u00a0cores"
    return (line.text, *said, f"[{machine}](bench/results/{line.result}.json)")


@cache
def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
