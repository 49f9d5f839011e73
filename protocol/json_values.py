"""Bounds of JSON values of any form, such as the schema of a tool."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting. Encoding deeper values would exceed Python's recursion limit."""
_LEAST, _MOST = -(2**63), 2**64 - 1
"""Whole numbers that msgpack can encode."""


def find_fault(value: Any) -> str:
    """Return why a decoded JSON value cannot be passed on; empty if it can."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            match one:
                case dict():
                    below += one.values()
                case list():
                    below += one
                case int() if not _LEAST <= one <= _MOST:
                    return "has a whole number of more than 64 bits; send it as a text"
        if not below:
            return ""
        level = below
    return f"is nested deeper than {MAX_DEPTH} levels"


def size_of(value: Any) -> int:
    """Return the bytes of memory that a decoded JSON value takes."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        size += getsizeof(one)
        match one:
            case dict():
                left += one
                left += one.values()
            case list():
                left += one
    return size
