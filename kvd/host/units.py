"""Counts of bytes and tokens, and durations as text.

Errors are `ValueError` with a message for users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_COUNTS = {"": 1, "K": 2**10, "M": 2**20}
_SIZES = {
    **_COUNTS,
    "G": 2**30,
    "T": 2**40,
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
_DURATIONS = {"MS": 0.001, "S": 1, "M": 60, "H": 3600, "D": 86_400}
MAX_BYTES = 2**63 - 1
"""The protocol's limit for integers."""
MAX_S = 365 * 24 * 3600.0
"""The protocol's limit for durations."""
_PART = re.compile(r"\d+(?:\.\d+)?(?:ms|[smhd])", re.ASCII)
_KEEP_ALIVE = re.compile(r"([+-]?)((?:\d+(?:\.\d+)?(?:ms|[smhd]))+|\d+(?:\.\d+)?)", re.ASCII)
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str | int) -> int:
    """Parse sizes such as ``8GiB``, ``500 MB`` or ``1073741824``; return numbers unchanged.

    ``8G`` is ``8GiB``.
    """
    if isinstance(text, int):
        return text
    count = _parse(text, _SIZES)
    if count is None:
        raise ValueError(f"{text[:40]!r} is not a size; write it like 8GiB, 500MB or 1073741824")
    if not 1 <= count <= MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is out of range; sizes are 1 byte to 8 million TiB")
    return int(count)


def parse_tokens(text: str) -> int:
    """Parse token counts such as ``4096``, ``64k`` or ``1M``; ``1k`` is 1024, ``1M`` is 1024k."""
    count = _parse(text, _COUNTS)
    if count is None or not count.is_integer():
        raise ValueError(
            f"{text[:40]!r} is not a number of tokens; write it like 4096 or 64k (1k is 1024)"
        )
    return int(count)


def _parse(text: str, factors: Mapping[str, float]) -> float | None:
    """Return a number times the factor of its unit; None if the text is something else."""
    found = _NUMBER.fullmatch(text)
    factor = factors.get(found[2].upper()) if found else None
    return None if found is None or factor is None else float(found[1]) * factor


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``7d``, ``12h``, ``30m`` or ``90s``."""
    seconds = _parse(text, _DURATIONS)
    if seconds is None:
        raise ValueError(f"{text[:40]!r} is not a duration; write it like 7d, 12h, 30m or 90s")
    return seconds


def parse_keep_alive(given: str | float) -> float:
    """Return seconds, of a number or a text such as ``300``, ``5m``, ``1h30m`` or ``-1``.

    Negative values mean no limit.
    """
    seconds = _signed_seconds(given) if isinstance(given, str) else given
    if seconds is not None and abs(seconds) <= MAX_S:
        return float(seconds)
    raise ValueError(
        f"{str(given)[:40]!r} is not a time to stay loaded; write seconds or a duration up to"
        " 365d, such as 300, 5m or 1h30m, 0 to unload when idle, or -1 for no limit"
    )


def _signed_seconds(text: str) -> float | None:
    parts = _KEEP_ALIVE.fullmatch(text.strip())
    if parts is None:
        return None
    if parts[2][-1].isdigit():
        seconds = float(parts[2])
    else:
        seconds = sum(map(parse_duration, _PART.findall(parts[2])))
    return -seconds if parts[1] == "-" else seconds


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
