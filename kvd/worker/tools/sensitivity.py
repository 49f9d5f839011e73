"""Measures what quantizing the keys or the values of one layer costs, and mixes bits by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvd.worker.cache.layout import AttentionPart, Layout
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving.bit_mix import MEASURED, LayerSides, Side, complete
from kvd.worker.serving.calibration import LayerLoss
from kvd.worker.serving.runner import Runner
from kvd.worker.tools import fidelity

_DENSE = Scheme(16, 16)
_WORST_KL = 1000.0
"""Loss in nats of a layer whose measurement is not finite: more than any finite one."""


def layers_of(layout: Layout) -> list[int]:
    """Return the entries of the layout that keep keys and values."""
    return list(dict.fromkeys(entry for entry, _ in layout.attention()))


def measure_layer(runner: Runner, entry: int, prompts: Sequence[Sequence[int]]) -> LayerLoss:
    """Measure one layer: each of `MEASURED` for its keys alone, and for its values alone.

    ``runner``: of `fidelity.serve`; its cache must be empty. Raises `TooShortError` as
    `fidelity.measure` does.
    """
    cache = runner.cache
    layers = len(cache.layout.entries)
    schemes = [Scheme(bits, 16) for bits in MEASURED] + [Scheme(16, bits) for bits in MEASURED]
    mixes = [
        tuple(scheme if layer == entry else _DENSE for layer in range(layers)) for scheme in schemes
    ]
    settings = CacheSettings(tuple(schemes), tuple(mixes), scratch=cache.settings.scratch)
    own = ModelCache(cache.layout, settings, access=cache.access, batched=cache.batched)
    own.use(cache.stores[0].page_product, None)
    # Without decoded tokens: a prompt's own are enough to compare layers, and take less time.
    found = fidelity.measure(Runner(runner.model, own), prompts, decoded=0)
    kls = [one.kl if math.isfinite(one.kl) else _WORST_KL for one in found]
    keys = dict(zip(MEASURED, kls[: len(MEASURED)], strict=True))
    values = dict(zip(MEASURED, kls[len(MEASURED) :], strict=True))
    return LayerLoss(layer=entry, keys=keys, values=values)


def sides_of(layout: Layout, losses: Sequence[LayerLoss]) -> Iterator[LayerSides]:
    """Yield the sides of each layer of `layers_of`, with the losses at all widths."""
    by_entry = {loss.layer: loss for loss in losses}
    for entry in layers_of(layout):
        parts = [part for part in layout.entries[entry].parts if isinstance(part, AttentionPart)]
        loss = by_entry[entry]
        yield LayerSides(
            entry,
            str(parts[0].kind),
            Side(sum(p.geometry.kv_heads * p.geometry.k_dim for p in parts), complete(loss.keys)),
            Side(sum(p.geometry.kv_heads * p.geometry.v_dim for p in parts), complete(loss.values)),
        )
