"""Time limits for decode attention on an H200, compared with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.attention.plans import LONG, PAIR, UNEQUAL
from bench.bars import Bar

_LIMITS_MS = {
    ("k4v4", LONG.lengths): 0.14,
    ("k8v8", LONG.lengths): 0.28,
    ("k4v4", PAIR.lengths): 0.09,
}
UNEQUAL_SHARE = 0.25
"""Limit of the time of one long and seven short rows, relative to that of eight long rows."""
RATE_SHARE = 0.85
"""Least bytes per second of any bits, relative to those of `RATE_OF`."""
RATE_OF = "k4v4"


def bars(measured: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return the limits for which ``measured`` has results of the fused kernels."""
    fused = {
        (row["scheme"], tuple(row["lengths"])): row
        for row in measured
        if row["part"] == "bars" and row["path"].startswith("fused")
    }
    found = [
        Bar(f"{fused[key]['shape']}, {key[0]}, ms", fused[key]["ms"], limit)
        for key, limit in _LIMITS_MS.items()
        if key in fused
    ]
    for scheme in ("k4v4", "k8v8"):
        long, unequal = (fused.get((scheme, one.lengths)) for one in (LONG, UNEQUAL))
        if long and unequal:
            share = unequal["ms"] / long["ms"]
            what = f"time of 1 x 32768 + 7 x 512 relative to 8 x 32768, {scheme}"
            found.append(Bar(what, share, UNEQUAL_SHARE))
    return found + _rates(measured)


def _rates(measured: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return the rates at which pages of other bits are read, relative to `RATE_OF`."""
    rates = {
        row["scheme"]: row["bytes_per_s"]
        for row in measured
        if row["part"] == "bits" and row["path"].startswith("fused")
    }
    if not (base := rates.pop(RATE_OF, None)):
        return []
    return [
        Bar(f"bytes per second relative to {RATE_OF}, {scheme}", rate / base, RATE_SHARE, True)
        for scheme, rate in rates.items()
    ]
