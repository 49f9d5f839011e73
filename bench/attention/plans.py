"""The plan of measurements: shapes, schemes and paths, by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.attention.case import Shape
from kvd.worker.cache.scheme import BITS, Scheme

LONG = Shape((32768,) * 8)
PAIR = Shape((50176,) * 2, q_heads=16)
UNEQUAL = Shape((32768,) + (512,) * 7)
LENGTHS = (512, 2048, 8192, 32768, 131072)

_Plan = Iterator[tuple[Shape, tuple[Scheme, ...], tuple[str, ...]]]
_BOTH = (Scheme(4, 4), Scheme(8, 8))
_FEW = (Scheme(4, 4),)
_MIXED = (Scheme(5, 3), Scheme(6, 3), Scheme(5, 4), Scheme(8, 4))
_ALL = ("fused", "reference", "dense", "masked")


def _bars() -> _Plan:
    for shape in (LONG, PAIR):
        yield shape, _BOTH, _ALL
    yield UNEQUAL, _BOTH, ("fused", "reference", "masked")


def _length() -> _Plan:
    for length in LENGTHS:
        shape = Shape((length,) * 8)
        yield shape, tuple(Scheme(bits, bits) for bits in BITS), ("fused", "dense")
        yield shape, (Scheme(8, 8),), ("reference", "masked")


def _gqa() -> _Plan:
    for repeats in (1, 2, 4, 8, 16):
        yield Shape((8192,) * 8, 8 * repeats), _FEW, ("fused", "dense")


def _dim() -> _Plan:
    for dim in (64, 80, 96, 112, 128, 192, 256):
        yield Shape((8192,) * 8, dim=dim), _FEW, ("fused", "dense")


def _bits() -> _Plan:
    yield LONG, (*(Scheme(bits, bits) for bits in BITS), *_MIXED), ("fused",)


PARTS: dict[str, Callable[[], _Plan]] = {
    "bars": _bars, "length": _length, "gqa": _gqa, "dim": _dim, "bits": _bits,
}  # fmt: skip
