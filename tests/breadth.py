"""Tests with many similar cases run a part of them, or all with ``KVD_TESTS=all``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

ALL = os.environ.get("KVD_TESTS") == "all"
_Case = TypeVar("_Case")


def part_of(cases: Sequence[_Case], step: int) -> list[_Case]:
    """Return every ``step``-th case."""
    return [*cases[:: 1 if ALL else step]]
