"""Chooses bits for each layer's keys and values that cost the least quality at a given size.

The quality loss of quantizing several layers is close to the sum of the losses of quantizing each
of them alone (`docs/fidelity.md`). So the best choice is a knapsack: each *side* (the keys or the
values of one layer) takes one width, and the sum of the losses is minimal while the pages are no
larger than with the same bits everywhere. It is solved exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    unit = math.gcd(limit, *(side.elements for side in sides))
    unit *= max(1, -(-limit // (unit * _MAX_UNITS)))
    room = limit // unit
    # best[used]: the least loss of the sides so far, and their widths, in this many units.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for side, own in zip(sides, widths, strict=True):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (loss, chosen) in best.items():
            for width in own:
                size = used - (-width * side.elements // unit)
                total = loss + side.losses[width]
                if size <= room and (size not in found or total < found[size][0]):
                    found[size] = (total, (*chosen, width))
        best = found
    # Sizes are rounded up, so the smallest widths may seem too large.
    return list(min(best.values())[1]) if best else smallest


def predicted(sides: Sequence[Side], bits: Sequence[int]) -> float:
    """Return the sum of the losses, in nats."""
    return math.fsum(side.losses[width] for side, width in zip(sides, bits, strict=True))
