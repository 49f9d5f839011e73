"""The limits that the measurements are compared with."""

from __future__ import annotations

from typing import Any

from bench.bars import Bar

SHARE_OF_COLD = 0.1
"""Limit of a restored prompt's time to the first token, relative to a cold one above `LONG_S`."""
LONG_S = 2.0
NOT_CACHED = 0.05
BEYOND_PAGES = 0.03
GAPS = 1.3
"""Limit of the 99th percentile between tokens during a read, relative to the undisturbed one."""


def bars_of(name: str, found: dict[str, Any], cold_s: float) -> list[Bar]:
    """Return the bars of a way to restore a prompt that takes ``cold_s`` without the store."""
    share = SHARE_OF_COLD if cold_s > LONG_S else 1.0
    bars = [
        Bar(f"{name}, time of cold", found["share_of_cold"], share),
        Bar(f"{name}, answers that differ", float(not found["equal_to_cold"]), 0),
    ]
    if "uncached" not in name or found.get("restored_from_disk"):  # prefill may be faster
        bars.append(Bar(f"{name}, tokens not cached", 1 - found["cached_share"], NOT_CACHED))
    return bars
