"""The flush over layers: what waits in them is written some layers at a time.

Each evaluation waits for the device once, and for a small model on an accelerator that is most of a
flush. What is written together is held twice for a moment, so only so much of it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from kvd.worker.cache.layer import LayerStore, Placement, Writing

TOGETHER_BYTES = 16 * 1024 * 1024


def flush(
    layers: Sequence[LayerStore], placements: list[Placement], shifts: dict[int, list[int]]
) -> None:
    """Write pending pages and close the gaps that they leave in tails; evaluates.

    ``shifts``: by number of pages that leave a tail, the tails' slots. The device must be idle.
    """
    for some in _together((layer, layer.gather(placements, shifts)) for layer in layers):
        # Evaluated first, so that nothing but the write holds a pool: it is in place then.
        mx.eval([writing.arrays() for _, writing in some])
        for layer, writing in some:
            layer.put(writing)
        mx.eval([layer.written(writing) for layer, writing in some])


def _together(
    writings: Iterable[tuple[LayerStore, Writing]],
) -> Iterator[list[tuple[LayerStore, Writing]]]:
    some: list[tuple[LayerStore, Writing]] = []
    nbytes = 0
    for layer, writing in writings:
        some.append((layer, writing))
        nbytes += sum(array.nbytes for array in writing.arrays())
        if nbytes >= TOGETHER_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some
