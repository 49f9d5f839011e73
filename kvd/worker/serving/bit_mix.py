"""Chooses bits for each layer's keys and values that cost the least quality at a given size.

The quality loss of quantizing several layers is close to the sum of the losses of quantizing each
of them alone (`docs/fidelity.md`). So the best choice is a knapsack: each *side* (the keys or the
values of one layer) takes one width, and the sum of the losses is minimal while the pages are no
larger than with the same bits everywhere. It is solved exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvd.worker.cache.scheme import Scheme
from kvd.worker.lean_imports import np

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Bits per element that pages can have, apart from 16."""
MEASURED = (3, 4, 6)
"""Bits at which losses are measured. The others follow, because losses fall exponentially."""
_MAX_UNITS = 1 << 14
"""Maximum size of the knapsack. Sizes are rounded up to larger units beyond it."""


@dataclass(frozen=True)
class Side:
    """The keys or the values of one layer."""

    elements: int
    """Elements per token, in all heads."""
    losses: Mapping[int, float]
    """KL divergence in nats if only this side is quantized, by bits."""


def complete(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the losses at all `WIDTHS` from those at two or more of them.

    The logarithm of a loss is linear in the bits between two measured widths, and continues so
    outside of them. Losses never grow with the bits: noise of the measurement is removed.
    """
    bits = sorted(measured)
    logs: list[float] = []
    for one in bits:
        value = math.log(max(measured[one], 1e-12))
        logs.append(min(value, logs[-1]) if logs else value)

    def at(width: int) -> float:
        right = next((n for n, one in enumerate(bits) if one >= width), len(bits) - 1)
        right = max(1, right)
        (x0, x1), (y0, y1) = bits[right - 1 : right + 1], logs[right - 1 : right + 1]
        return math.exp(y0 + (y1 - y0) * (width - x0) / (x1 - x0))

    return {width: at(width) for width in WIDTHS}


def choose(
    sides: Sequence[Side], limit: int, allowed: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the bits of each side with the least sum of losses.

    ``limit``: bits per token that all sides may take together, without scales. ``allowed``: widths
    that each side may have; None: `WIDTHS`. Raises ``ValueError`` if even the smallest widths
    exceed the limit.
    """
    widths = allowed or [WIDTHS] * len(sides)
    smallest = [min(own) for own in widths]
    if sum(side.elements * width for side, width in zip(sides, smallest, strict=True)) > limit:
        raise ValueError("the smallest widths do not fit the size")
    room = limit - sum(side.elements * width for side, width in zip(sides, smallest, strict=True))
    unit = max(1, math.gcd(room, *(side.elements for side in sides)))
    unit *= max(1, -(-room // (unit * _MAX_UNITS)))
    size = room // unit + 1
    # best[used]: the least loss of the sides so far that take this many units more than with their
    # smallest widths. Arrays, because loops over 16,384 sizes took 6 s for 72 sides.
    best = np.full(size, np.inf)
    best[0] = 0.0
    taken: list[tuple[np.ndarray, dict[int, int]]] = []
    for side, own, least in zip(sides, widths, smallest, strict=True):
        units = {width: -((least - width) * side.elements // unit) for width in own}
        found, chosen = np.full(size, np.inf), np.zeros(size, np.uint8)
        for width, more in units.items():
            if more < size:
                total = best[: size - more] + side.losses[width]
                less = total < found[more:]
                found[more:][less], chosen[more:][less] = total[less], width
        taken.append((chosen, units))
        best = found
    used = int(best.argmin())
    bits = []
    for chosen, units in reversed(taken):
        bits.append(int(chosen[used]))
        used -= units[bits[-1]]
    return bits[::-1]


def predicted(sides: Sequence[Side], bits: Sequence[int]) -> float:
    """Return the sum of the losses, in nats."""
    return math.fsum(side.losses[width] for side, width in zip(sides, bits, strict=True))


@dataclass(frozen=True)
class LayerSides:
    """The keys and the values of one layer."""

    entry: int
    """The layer's number among the model's caches."""
    kind: str
    """The attention kind. Layers of one kind share a size."""
    keys: Side
    values: Side


def mix_bits(
    layers: Sequence[LayerSides],
    count: int,
    schemes: Sequence[Scheme],
    widths: Sequence[int] = WIDTHS,
) -> list[tuple[Scheme, ...] | None]:
    """Return the schemes by layer for each precision level, of the same size as the level's own.

    ``layers``: those that keep keys and values. ``count``: the number of the model's caches.
    ``widths``: bits that a side may get, besides those of its level. A layer never has more bits
    than on the level above. None: the level's own scheme is the best, or it is not quantized.
    Layers of different attention kinds have knapsacks of their own, because a window bounds the
    bytes of some of them.
    """
    kinds = dict.fromkeys(layer.kind for layer in layers)
    found: list[tuple[Scheme, ...] | None] = []
    above = [Scheme(16, 16)] * count
    for scheme in schemes:
        mixed = [scheme] * count
        if 16 not in (scheme.k_bits, scheme.v_bits):
            for kind in kinds:
                same = [layer for layer in layers if layer.kind == kind]
                for layer, bits in zip(same, _choose(same, scheme, above, widths), strict=True):
                    mixed[layer.entry] = Scheme(*bits, scheme.k_group, scheme.v_group)
        differs = any(mixed[layer.entry] != scheme for layer in layers)
        found.append(tuple(mixed) if differs else None)
        above = mixed
    return found


def _choose(
    layers: Sequence[LayerSides], scheme: Scheme, above: Sequence[Scheme], widths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the bits of keys and values of each layer."""
    sides, allowed = [], []
    for layer in layers:
        ceiling = above[layer.entry]
        sides += [layer.keys, layer.values]
        allowed += [
            _up_to(ceiling.k_bits, {*widths, scheme.k_bits}),
            _up_to(ceiling.v_bits, {*widths, scheme.v_bits}),
        ]
    limit = sum(
        layer.keys.elements * scheme.k_bits + layer.values.elements * scheme.v_bits
        for layer in layers
    )
    try:
        bits = iter(choose(sides, limit, allowed))
    except ValueError:  # the widths are wider than the level's
        bits = iter([scheme.k_bits, scheme.v_bits] * len(layers))
    yield from zip(bits, bits, strict=True)


def _up_to(most: int, widths: set[int]) -> list[int]:
    return sorted(width for width in widths if width <= most) or [most]
