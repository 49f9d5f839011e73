"""Byte counts of one rank's cache, multiplied by the number of ranks."""

from __future__ import annotations

from typing import Any

_BYTES = frozenset(
    {
        "charge",
        "charge_of",
        "charged_bytes",
        "checkpoint_bytes",
        "checkpoint_charge",
        "continued_bytes",
        "freed_bytes",
        "held_bytes",
        "level_bytes",
        "nbytes",
        "pages_bytes",
        "row_bytes",
        "snapshot_charge",
        "tails_bytes",
        "token_bytes",
        "unit_bytes",
        "used_bytes",
    }
)
"""Attributes and methods whose values are bytes of one rank."""


class Summed:
    """Stands for an object of the cache; its byte counts are those of all ranks together.

    The ranks hold equal parts of every layer, so each count is a multiple of one rank's.
    """

    def __init__(self, one: Any, ranks: int) -> None:
        self._one = one
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        if name not in _BYTES:
            return found
        if callable(found):
            return lambda *args: self._sum(found(*args))
        return self._sum(found)

    def _sum(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(one * self._ranks for one in value)
        return value * self._ranks
