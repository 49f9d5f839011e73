"""The table that compares kvd with llama.cpp's server, from a result of `bench.serve --llama`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.pages.markdown import table

RESULT = Path(__file__).parents[2] / "bench" / "results" / "serve-llama-linux-cpu.json"
_OURS, _BEST = "kvd k8v8", "best llama"
_HEAD = (
    "trace",
    "kvd, K8V8",
    "llama-server",
    "its best setting",
    "tokens",
    "first token, p50",
    "gap, p99",
    "peak memory",
)
_RATIOS = ("tok_s", "ttft_p50", "itl_p99", "peak_bytes")


def parts() -> dict[str, str]:
    """Return the generated part of docs/performance.md."""
    if not RESULT.exists():
        return {"llama": "No result of this comparison is committed yet."}
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    return {"llama": table(_HEAD, rows(found))}


def rows(found: Any) -> Iterator[tuple[str, ...]]:
    """Yield a row for each trace of a result that both servers ran."""
    for trace, sides in found["traces"].items():
        best = found["best_llama"][trace]
        if best is None or _OURS not in sides:
            continue
        compared = found["ratios"][trace][f"{_OURS} / {_BEST}"]
        yield (
            f"`{trace}`",
            *(f"{sides[side]['median']['tok_s']:.0f}\u00a0tok/s" for side in (_OURS, best)),
            best.removeprefix("llama "),
            *(f"{compared[name]['median']:.2f}" for name in _RATIOS),
        )
