"""Results as JSON, and how measures are shown."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from kvd.bench.measure import Results, median

COLUMNS: dict[str, tuple[str, float, int]] = {
    "tok_s": ("tok/s", 1, 0),
    "decode_tok_s": ("decode tok/s", 1, 0),
    "ttft_p50": ("TTFT p50 ms", 1e3, 0),
    "ttft_p99": ("p99", 1e3, 0),
    "itl_p50": ("gap p50 ms", 1e3, 1),
    "itl_p99": ("p99", 1e3, 1),
    "during_p50": ("while long p50", 1e3, 1),
    "during_p99": ("p99", 1e3, 1),
    "late_ttft": ("long TTFT ms", 1e3, 0),
    "cpu_ms_per_token": ("CPU ms/token", 1, 2),
    "decode_cpu_ms_per_token": ("decoding", 1, 2),
    "peak_bytes": ("peak MB", 1e-6, 0),
    "largest_bytes": ("of one process", 1e-6, 0),
}
"""Heading, factor and number of digits of each measure."""
LOWER_IS_BETTER = frozenset(COLUMNS) - {"tok_s", "decode_tok_s"}


def as_json(about: dict[str, Any], results: Results) -> dict[str, Any]:
    """Return ``about`` and all results, including the runs behind each median."""
    traces = {
        trace: {
            side: {"median": median(runs), "runs": [asdict(run) for run in runs]}
            for side, runs in sides.items()
        }
        for trace, sides in results.items()
    }
    found: dict[str, Any] = rounded({**about, "traces": traces})
    return found


def rounded(value: Any) -> Any:
    """Round floats to six digits, and replace nan, which JSON lacks, by None."""
    match value:
        case float():
            return None if math.isnan(value) else float(f"{value:.6g}")
        case dict():
            return {key: rounded(one) for key, one in value.items()}
        case list() | tuple():
            return [rounded(one) for one in value]
        case _:
            return value
