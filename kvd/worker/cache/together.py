"""Evaluates arrays of several layers together: each evaluation waits for the device once.

With one evaluation per array, eight requests after an idle time needed 784 evaluations, to give a
model of 28 layers its tails and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from kvd.worker.device import on_cpu

GPU_BYTES = 16 * 1024 * 1024
"""Bytes that are evaluated together on an accelerator. They exist twice meanwhile."""
CPU_BYTES = 256 * 1024
"""Bytes that are evaluated together on a CPU, where a wait costs less."""

Replacement = tuple[Sequence[mx.array], Callable[[], None]]
"""Lazy copies of arrays, and a function that puts them in their place."""


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
        nbytes += sum(array.nbytes for array in replacement[0])
        if nbytes >= limit:
            _put(together)
            nbytes = 0
    if together:
        _put(together)


def _put(together: list[Replacement]) -> None:
    mx.eval([arrays for arrays, _ in together])
    for _, put in together:
        put()
    together.clear()
