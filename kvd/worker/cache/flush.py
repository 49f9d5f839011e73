"""The flush over layers: pages are written some layers at a time.

Each evaluation waits for the device once, and for a small model on an accelerator that is most of a
flush. What is written together is held twice for a moment, so only so much of it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from kvd.worker.cache.layer import LayerStore, Placement, Writing

TOGETHER_BYTES = 16 * 1024 * 1024
"""Of an accelerator. On the CPU nobody waits for a device, and each layer is written alone."""


def flush(layers: Sequence[LayerStore], placements: list[Placement]) -> None:
    """Write pages, and what chunks leave to tails; evaluates. The device must be idle."""
    limit = TOGETHER_BYTES if mx.default_device().type == mx.DeviceType.gpu else 0
    _write(layers, (layer.gather_pages(placements) for layer in layers), limit)
    if any(layer.new_tails for layer in layers):
        _write(layers, (layer.gather_tails() for layer in layers), limit)


def _write(layers: Sequence[LayerStore], writings: Iterable[Writing], limit: int) -> None:
    some: list[tuple[LayerStore, Writing]] = []
    nbytes = 0
    for pair in zip(layers, writings, strict=True):
        some.append(pair)
        nbytes += sum(array.nbytes for array in pair[1].arrays())
        del pair  # what is written is let go before more is gathered
        if nbytes >= limit:
            _write_together(some)
            nbytes = 0
    _write_together(some)


def _write_together(some: list[tuple[LayerStore, Writing]]) -> None:
    # Evaluated first, so that nothing but the write holds a pool: it is in place then.
    mx.eval([writing.arrays() for _, writing in some])
    for layer, writing in some:
        layer.put(writing)
    mx.eval([layer.written(writing) for layer, writing in some])
    some.clear()
