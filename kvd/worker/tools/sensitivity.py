"""Measures what quantizing the keys or the values of one layer costs, and mixes bits by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layout import AttentionPart, Layout
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving.calibration import LayerLoss
from kvd.worker.serving.runner import Runner
from kvd.worker.tools import fidelity
from kvd.worker.tools.bit_mix import MEASURED, WIDTHS, Side, choose, complete

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


@dataclass(frozen=True)
class _Layer:
    """A layer's sides, in a knapsack with the other layers of its attention kind."""

    entry: int
    kind: Kind
    keys: Side
    values: Side


def mix_bits(
    layout: Layout, losses: Sequence[LayerLoss], schemes: Sequence[Scheme]
) -> list[tuple[Scheme, ...] | None]:
    """Return the schemes by layer for each precision level, of the same size as the level's own.

    A layer never has more bits than on the level above. None: the level's own scheme is the best,
    or it is not quantized. Layers of different attention kinds have knapsacks of their own, because
    a window bounds the bytes of some of them.
    """
    layers = list(_layers(layout, losses))
    kinds = dict.fromkeys(layer.kind for layer in layers)
    found: list[tuple[Scheme, ...] | None] = []
    above = [_DENSE] * len(layout.entries)
    for scheme in schemes:
        mixed = [scheme] * len(layout.entries)
        if 16 not in (scheme.k_bits, scheme.v_bits):
            for kind in kinds:
                same = [layer for layer in layers if layer.kind == kind]
                for layer, bits in zip(same, _choose(same, scheme, above), strict=True):
                    mixed[layer.entry] = Scheme(*bits, scheme.k_group, scheme.v_group)
        differs = any(mixed[layer.entry] != scheme for layer in layers)
        found.append(tuple(mixed) if differs else None)
        above = mixed
    return found


def _choose(
    layers: Sequence[_Layer], scheme: Scheme, above: Sequence[Scheme]
) -> Iterator[tuple[int, int]]:
    """Yield the bits of keys and values of each layer."""
    sides, allowed = [], []
    for layer in layers:
        ceiling = above[layer.entry]
        sides += [layer.keys, layer.values]
        allowed += [_up_to(ceiling.k_bits), _up_to(ceiling.v_bits)]
    limit = sum(
        layer.keys.elements * scheme.k_bits + layer.values.elements * scheme.v_bits
        for layer in layers
    )
    bits = iter(choose(sides, limit, allowed))
    yield from zip(bits, bits, strict=True)


def _up_to(bits: int) -> list[int]:
    return [width for width in WIDTHS if width <= bits]


def _layers(layout: Layout, losses: Sequence[LayerLoss]) -> Iterator[_Layer]:
    by_entry = {loss.layer: loss for loss in losses}
    for entry in layers_of(layout):
        parts = [part for part in layout.entries[entry].parts if isinstance(part, AttentionPart)]
        loss = by_entry[entry]
        yield _Layer(
            entry,
            parts[0].kind,
            Side(sum(p.geometry.kv_heads * p.geometry.k_dim for p in parts), complete(loss.keys)),
            Side(sum(p.geometry.kv_heads * p.geometry.v_dim for p in parts), complete(loss.values)),
        )
