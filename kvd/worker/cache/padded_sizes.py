"""Padded sizes of lists and passes.

Steps are compiled, and attention is planned, for each shape. Padding leaves few shapes.
"""

from __future__ import annotations

from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.device import on_cuda

SIZES_PER_DOUBLING = 4
"""Padded sizes between a power of two and the next, so that padding adds less than a quarter."""


def padded_work(count: int) -> int:
    """Return the padded length of a list whose padding costs work."""
    step = max(1, (1 << count.bit_length() - 1) // SIZES_PER_DOUBLING) if count else 1
    return -(-count // step) * step


def padded_length(count: int) -> int:
    """Return the padded length of a list whose padding is never read: few sizes are best."""
    length = 64
    while length < count:
        length *= 4
    return length


def attention_is_planned() -> bool:
    """Return whether the device makes a plan for each new shape of dense attention.

    cuDNN takes 50 to 100 ms for a plan.
    """
    return on_cuda()


def padded_width(tokens: int) -> int:
    """Return the width of a pass with ``tokens`` prompt tokens per row: whole pages."""
    return PAGE_TOKENS * -(-tokens // PAGE_TOKENS)
