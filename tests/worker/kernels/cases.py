"""Cases for the decode kernels: a chosen few that cover much, or all.

The chosen cases contain as many pairs of values from two dimensions as possible, such as 4 key bits
with float16. Language is a dimension too, so each value runs in both languages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import mlx.core as mx

from protocol.schemes import BITS
from tests.worker.kernels.decoding import Case
from tests.worker.kernels.wrap import Language

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128))
REPEATS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
ROWS = (
    ((2, 70), (0, 8), (5, 127)),
    ((0, 64), (9, 100)),  # more than one split of pages
    ((4, 0), (1, 63)),  # a tail without tokens
    ((3, 126), (0, 9), (0, 128)),
    ((33, 65),),
    ((0, 12), (0, 127)),  # no pages at all
)
SHORT = ((0, 1), (0, 63), (0, 64), (0, 65), (1, 64), (3, 65))
LONG = ((624, 64), (0, 1), (62, 127), (1, 64))
"""Rows of very unequal lengths, up to 40 000 tokens."""
WINDOWS = ((None, 0), (100, 0), (300, 70), (9, 4), (64, 0))
VALUES: dict[str, tuple[Any, ...]] = {
    "language": ("metal", "cuda"),
    "dtype": DTYPES,
    "dims": DIMS,
    "k_bits": BITS,
    "v_bits": BITS,
    "k_group": (32, 64),
    "v_group": (32, 64, 128),
    "repeats": REPEATS,
    "queries": (1, 2, 3, 4, 5, 6, 7, 8),
    "rows": ROWS,
    "window": WINDOWS,
    "sinks": (False, True),
    "padding": (0, 3),
    "levels": (1, 2),
}
_TRIED = 250
"""Random candidates per case. The one with the most new pairs is chosen."""

_ALONE = 20
"""Extra weight, in pairs, of a value that is new in a language."""

MATRIX = (
    Case(mx.bfloat16, 64, 64, 2, 4, 1, ("k4v4",), ROWS[0], sinks=True),
    Case(mx.float16, 128, 128, 2, 3, 2, ("k8v4", "k4v8"), ROWS[1], 300, 70),
    Case(mx.float16, 192, 128, 1, 8, 3, ("k8v8",), ((3, 65), (0, 9)), padding=3),
    Case(mx.bfloat16, 128, 128, 1, 5, 1, ("k4v4", "k8v8", "k4v8"), ((6, 65),), sinks=True),
    Case(mx.bfloat16, 64, 64, 2, 1, 5, ("k8v8", "k4v4"), ((4, 4), (1, 63)), window=100),
    Case(mx.bfloat16, 128, 128, 1, 16, 1, ("k5v3",), SHORT, sinks=True),
    Case(mx.float16, 64, 64, 2, 1, 1, ("k3v5", "k6v2", "k2v6"), ROWS[1], window=100),
    Case(mx.bfloat16, 192, 128, 1, 6, 1, ("k6v6", "k4v4", "k2v2"), ROWS[0], 300, 70, padding=3),
    Case(mx.float16, 80, 64, 1, 4, 1, ("k3v3", "k8v4", "k5v5"), ((7, 64), (2, 65))),
)
"""Cases for CUDA's tensor cores, which accept only some head sizes and groups. The tokens of all
queries are in the tail, as in kvd, where the newest 64 tokens are never in a page."""

Values = dict[str, Any]


def values_of(count: int) -> list[Values]:
    """Return the values of this many cases, with as many distinct pairs as possible."""
    source = random.Random(6)  # with this seed, 20 cases contain all values in both languages
    seen: set[Any] = set()
    found = []
    for _ in range(count):
        tried = [{name: source.choice(of) for name, of in VALUES.items()} for _ in range(_TRIED)]
        found.append(max(tried, key=lambda one: _gain(one, seen)))
        seen |= _pairs(found[-1])
    return found


def all_values() -> Iterator[Values]:
    """Yield every combination of language, head sizes, bits and dtype, the rest random."""
    source = random.Random(2)
    names = ("language", "dims", "k_bits", "v_bits", "dtype")
    for values in product(*(VALUES[name] for name in names)):
        drawn = {name: source.choice(of) for name, of in VALUES.items()}
        yield drawn | dict(zip(names, values, strict=True))


def missing(chosen: list[Values]) -> list[tuple[str, Any, Language]]:
    """Return each value that no chosen case has in a language, with that language."""
    covered = {(name, one[name], one["language"]) for one in chosen for name in VALUES}
    return [
        (name, value, language)
        for name, of in VALUES.items()
        for value in of
        for language in VALUES["language"]
        if name != "language" and (name, value, language) not in covered
    ]


def case_of(values: Values, number: int) -> Case:
    """Return the case with these values. Levels after the first have random schemes."""
    source = random.Random(number)
    first = (values["k_bits"], values["k_group"], values["v_bits"], values["v_group"])
    levels = [first]
    while len(levels) < values["levels"]:
        names = ("k_bits", "k_group", "v_bits", "v_group")
        levels.append(tuple(source.choice(VALUES[name]) for name in names))
    window, keep = values["window"]
    k_dim, v_dim = values["dims"]
    return Case(
        dtype=values["dtype"],
        k_dim=k_dim,
        v_dim=v_dim,
        kv_heads=1 if values["repeats"] > 4 else 2,
        repeats=values["repeats"],
        queries=values["queries"],
        schemes=tuple(f"k{k}g{kg}v{v}g{vg}" for k, kg, v, vg in levels),
        rows=values["rows"],
        window=window,
        keep=keep,
        sinks=values["sinks"],
        padding=values["padding"],
        seed=number,
    )


def _pairs(values: Values) -> set[Any]:
    return set(combinations(values.items(), 2))


def _gain(values: Values, seen: set[Any]) -> int:
    new = _pairs(values) - seen
    return len(new) + _ALONE * sum(a[0] == "language" for a, _ in new)
