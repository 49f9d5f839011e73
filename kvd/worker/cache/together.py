"""Evaluates arrays of several layers together: each evaluation waits for the device once.

With one evaluation per array, eight requests after an idle time needed 784 evaluations, to give a
model of 28 layers its tails and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from kvd.worker.device import on_cpu

GPU_BYTES = 64 * 1024 * 1024
"""Bytes that are evaluated together on an accelerator. They exist twice meanwhile, in the scratch,
which nothing else uses then."""
CPU_BYTES = 256 * 1024
"""Bytes that are evaluated together on a CPU, where a wait costs less."""


class Replacement(NamedTuple):
    """Copies that replace arrays, such as larger ones."""

    arrays: Sequence[mx.array]
    """The copies, lazy."""
    put: Callable[[], None]
    """Replaces the arrays by the copies, after their evaluation."""
    copied_bytes: int
    """Bytes that exist twice until then: those that both the arrays and the copies have."""


def limit_bytes() -> int:
    """Return how many bytes this device should evaluate together."""
    return CPU_BYTES if on_cpu() else GPU_BYTES


def replace_all(replacements: Iterable[Replacement]) -> None:
    """Evaluate the copies, and put each of them in its place. The device must be idle.

    Those that are evaluated together exist in addition to what they replace. If an evaluation
    fails, none of its copies replaces an array.
    """
    together: list[Replacement] = []
    nbytes, limit = 0, limit_bytes()
    for replacement in replacements:
        together.append(replacement)
        nbytes += replacement.copied_bytes
        if nbytes >= limit:
            _put(together)
            nbytes = 0
    if together:
        _put(together)


def _put(together: list[Replacement]) -> None:
    mx.eval([replacement.arrays for replacement in together])
    for replacement in together:
        replacement.put()
    together.clear()
