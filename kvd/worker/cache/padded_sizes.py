"""Sizes that lists and passes are padded to, so that what is made once a shape is made seldom."""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.cache.scheme import PAGE_TOKENS

STEPS_AN_OCTAVE = 4
"""Sizes between a number and its double: at most a quarter is padding."""


def padded_work(count: int) -> int:
    """Return what a list of so many is padded to where padding costs work."""
    step = max(1, (1 << count.bit_length() - 1) // STEPS_AN_OCTAVE) if count else 1
    return -(-count // step) * step


def padded_length(count: int) -> int:
    """Return the length of a list of so many: nobody looks at the rest, so few are best."""
    length = 64
    while length < count:
        length *= 4
    return length


def attention_is_planned() -> bool:
    """Return whether the device plans dense attention anew for every shape.

    On CUDA cuDNN does, which takes the host 50 to 100 ms.
    """
    return bool(mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available())


def padded_width(tokens: int) -> int:
    """Return the width of a pass of so many prompt tokens to a row: no more than a chunk's."""
    return PAGE_TOKENS * -(-tokens // PAGE_TOKENS)
