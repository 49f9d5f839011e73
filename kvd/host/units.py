"""Byte counts and durations as text. Errors are `ValueError` with a message for users."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MAX_BYTES = 2**63 - 1
"""The protocol's limit for integers."""
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Parse sizes such as ``8GiB``, ``500 MB`` or ``1073741824``; return numbers unchanged."""
    if isinstance(text, int):
        return text
    found = _BYTES.fullmatch(text)
    factor = _FACTORS.get(found[2].upper()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 500MB or 1073741824")
    count = float(found[1]) * factor
    if not 1 <= count <= MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is out of range; sizes are 1 byte to 8 million TiB")
    return int(count)


def format_bytes(count: int) -> str:
    """Return a short binary size, such as ``1.5 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a short duration, such as ``3h 12m``."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"
