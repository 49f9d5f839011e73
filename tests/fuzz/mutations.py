"""Strategies that mutate valid inputs: as bytes, as trees of JSON values, and as lines."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

NUMBERS = [
    0, -1, 1, 2, 15, 16, 17, 63, 64, 255, 256, 4095, 4096, 2**15, 2**16, 10**9, 2**31 - 1, 2**31,
    2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30, 0.0, -0.0, 0.5, -1.5,
    1e-320, 1e18, 1e308, -1e308,
]  # fmt: skip
TEXTS = [
    "", " ", "a", "\0", "\x1b[31m", "é", "\U0001f600", "\ud800", "../../etc/passwd", "/dev/zero",
    "%s%n", "{{ x }}", "null", "NaN", "-", "\n", "a" * 129, "b" * 257, "c" * 5000, "true", "k8v4",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], [None], [{}], {"": 0}, ["a", 1], [0] * 70,
    ["x"] * 20,
]  # fmt: skip
PIECES = [
    b"", b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\n", b"\r", b"\r\n", b"{", b"}", b"[", b"]",
    b'"', b"'", b"\\", b",", b":", b"0", b"-1", b"1e999", b"9" * 400, b"[" * 2000, b"NaN",
    b"Infinity", b"null", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b" " * 300,
]  # fmt: skip


_LEAVES = (str, int, float, type(None))
_MAX_DEPTH = 16
"""Each of four edits may double the depth, and `copy.deepcopy` takes two calls for a level."""


@st.composite
def edited_bytes(draw: DrawFn, seeds: Sequence[bytes], pieces: Sequence[bytes] = ()) -> bytes:
    """Cut, repeat, flip and insert bytes of a seed, or join it with another one."""
    data = draw(st.sampled_from(seeds))
    known = st.sampled_from([*PIECES, *pieces])
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 64)))
        match draw(st.sampled_from(["cut", "insert", "replace", "repeat", "flip", "end", "join"])):
            case "cut":
                data = data[:start] + data[end:]
            case "insert":
                data = data[:start] + draw(known) + data[start:]
            case "replace":
                data = data[:start] + draw(known | st.binary(max_size=8)) + data[end:]
            case "repeat":
                data = data[:end] + data[start:end] * draw(st.integers(1, 40)) + data[end:]
            case "flip" if start < len(data):
                changed = bytearray(data)
                changed[start] ^= 1 << draw(st.integers(0, 7))
                data = bytes(changed)
            case "end":
                data = data[:start]
            case "join":
                data = data[:start] + draw(st.sampled_from(seeds))
    return data[: 1 << 20]


def edited_tree(draw: DrawFn, tree: Any, names: Sequence[str] = ()) -> Any:
    """Return a copy of a JSON value with some of its members replaced, removed or added."""
    tree = copy.deepcopy(tree)
    keys = st.sampled_from([*names, *TEXTS])
    for _ in range(draw(st.integers(1, 4))):
        spots = list(_spots(tree))
        if not spots:
            return draw(st.sampled_from(VALUES))
        parent, key = draw(st.sampled_from(spots))
        match draw(st.sampled_from(["value", "value", "value", "delete", "add", "nest", "copy"])):
            case "value":
                parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "delete":
                del parent[key]
            case "add" if isinstance(parent, dict):
                parent[draw(keys)] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "nest":
                parent[key] = _nested(parent[key], draw(st.sampled_from([1, 2, 40])))
            case "copy":
                source, name = draw(st.sampled_from(spots))
                if name in source if isinstance(source, dict) else name < len(source):
                    parent[key] = copy.deepcopy(source[name])
    return tree


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Return each member of a tree as its parent and its key."""
    found: list[tuple[Any, Any]] = []
    open_: list[Any] = [tree]
    while open_ and len(found) < 200:
        parent = open_.pop(0)
        members: Any = ()
        if isinstance(parent, dict | list):
            members = parent.items() if isinstance(parent, dict) else enumerate(parent)
        for key, value in members:
            found.append((parent, key))
            open_.append(value)
    return found


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def encoded(tree: Any) -> bytes:
    """Return a JSON value as bytes; half surrogate pairs become escapes."""
    return json.dumps(tree).encode()


@st.composite
def edited_json(draw: DrawFn, seeds: Sequence[bytes], names: Sequence[str] = ()) -> bytes:
    """Edit a seed as a tree, or as bytes if that is impossible."""
    seed = draw(st.sampled_from(seeds))
    try:
        tree = json.loads(seed)
    except (ValueError, RecursionError):
        return draw(edited_bytes([seed]))
    if _is_deep(tree):
        return draw(edited_bytes([seed]))
    return encoded(edited_tree(draw, tree, names))


def _is_deep(tree: Any) -> bool:
    """Return whether copies of a tree in itself may be too deep to copy again."""
    level = [tree]
    for _ in range(_MAX_DEPTH):
        members = [one.values() if isinstance(one, dict) else one for one in level]
        level = [member for one in members if not isinstance(one, _LEAVES) for member in one]
    return bool(level)


@st.composite
def edited_lines(
    draw: DrawFn,
    seeds: Sequence[bytes],
    edit: Callable[[DrawFn, bytes], bytes],
    separator: bytes = b"\n",
) -> bytes:
    """Join lines of seeds in any order, of which some are edited."""
    lines = [line for seed in seeds for line in seed.split(separator) if line]
    chosen = draw(st.lists(st.sampled_from(lines), min_size=1, max_size=8))
    found = [edit(draw, line) if draw(st.booleans()) else line for line in chosen]
    return b"".join(line + separator for line in found)


def either(*strategies: SearchStrategy[bytes]) -> SearchStrategy[bytes]:
    return st.one_of(*strategies)
