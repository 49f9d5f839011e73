"""Selects a part of a test's similar cases; ``KVD_TESTS=all`` selects all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

ALL = os.environ.get("KVD_TESTS") == "all"
_Case = TypeVar("_Case")


def part_of(cases: Sequence[_Case], step: int) -> list[_Case]:
    """Return every ``step``-th case."""
    return [*cases[:: 1 if ALL else step]]
