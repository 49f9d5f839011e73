"""Sums over all ranks, in place of MLX's `mx.distributed.all_sum`.

The results are the same on all ranks, and a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

_all_sum = mx.distributed.all_sum

GATHERED_BYTES = 64 * 1024
"""Bytes up to which two ranks of a ring exchange whole arrays, which takes one round, not two.

A sum of 8 rows of 896 float32 took 72 µs instead of 96; from 224 KiB on it takes longer.
"""
SUM_PIECE = 1000 * 1024
"""Most bytes of a sum over sockets that block.

From 1 MiB on, MLX's ring sends in both directions. A thread then waits for its socket's time limit
before it sends: a sum of 1.8 MB took 11.8 ms, and 1.8 ms in two pieces.
"""
GATHER_PIECE = 250 * 1024
"""Most bytes of a sum over such sockets if the ranks exchange whole arrays."""


@dataclass(frozen=True)
class Sums:
    """Replaces `mx.distributed.all_sum`."""

    group: Any
    ring: bool
    """Whether the ranks are connected by MLX's ring of sockets."""
    blocking: bool
    """Whether reads of these sockets block."""

    def __call__(self, x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        """Return the sum of all ranks' arrays of this shape; lazy."""
        group = group or self.group
        ordered = group.size() > 2 or (self.ring and x.nbytes <= GATHERED_BYTES)
        add, most = (ordered_sum, GATHER_PIECE) if ordered else (_all_sum, SUM_PIECE)
        if not self.blocking or x.nbytes <= most:
            return add(x, group=group, stream=stream)
        return _by_pieces(
            lambda piece: add(piece, group=group, stream=stream), x, most // x.dtype.size
        )


@contextmanager
def own_terms() -> Iterator[None]:
    """Make sums return only this rank's term, so that no other rank is needed."""
    before = mx.distributed.all_sum
    mx.distributed.all_sum = lambda x, **_: x
    try:
        yield
    finally:
        mx.distributed.all_sum = before


def ordered_sum(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    """Return the sum of all ranks' arrays, added in the order of the ranks.

    `mx.distributed.all_sum` over more than two ranks adds in an order that depends on an element's
    place, so a row's result would depend on the other rows of its batch (measured: 53 of 256
    elements differ).
    """
    one = x if x.ndim else x[None]
    gathered = mx.distributed.all_gather(one, group=group, stream=stream)
    found, *others = mx.split(gathered, gathered.shape[0] // one.shape[0])
    for other in others:
        found = found + other
    return found if x.ndim else found[0]


def _by_pieces(add: Callable[[mx.array], mx.array], x: mx.array, size: int) -> mx.array:
    """Add pieces of at most ``size`` elements each."""
    flat = x.reshape(-1)
    pieces = [add(flat[at : at + size]) for at in range(0, flat.size, size)]
    return mx.concatenate(pieces).reshape(x.shape)
