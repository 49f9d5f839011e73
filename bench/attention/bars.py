"""Time limits for decode attention on an H200, compared with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.attention.plans import LONG, PAIR, UNEQUAL

_LIMITS_MS = {
    ("k4v4", LONG.lengths): 0.14,
    ("k8v8", LONG.lengths): 0.28,
    ("k4v4", PAIR.lengths): 0.09,
}
UNEQUAL_SHARE = 0.25
"""Limit of the time of one long and seven short rows, relative to that of eight long rows."""


@dataclass(frozen=True)
class Bar:
    """One limit, with the measurement that it applies to."""

    what: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the measurement is within the limit."""
        return self.value <= self.limit


def bars(measured: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return the limits for which ``measured`` has results of the fused kernels."""
    fused = {
        (row["scheme"], tuple(row["lengths"])): row
        for row in measured
        if row["part"] == "bars" and row["path"].startswith("fused")
    }
    found = [
        Bar(f"{fused[key]['shape']}, {key[0]}", fused[key]["ms"], limit, "ms")
        for key, limit in _LIMITS_MS.items()
        if key in fused
    ]
    for scheme in ("k4v4", "k8v8"):
        long, unequal = (fused.get((scheme, one.lengths)) for one in (LONG, UNEQUAL))
        if long and unequal:
            share = unequal["ms"] / long["ms"]
            what = f"1 x 32768 + 7 x 512 relative to 8 x 32768, {scheme}"
            found.append(Bar(what, share, UNEQUAL_SHARE, "of the time"))
    return found
