"""Finds what quantizing the keys or the values of each layer costs, by measuring or estimating."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence

from kvd.worker.cache.layout import AttentionPart, Layout
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import PAGE_TOKENS, Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.device import on_cpu
from kvd.worker.serving.bit_choice import text_ids
from kvd.worker.serving.bit_mix import MEASURED, LayerSides, Side, complete
from kvd.worker.serving.bit_probe import CPU_UNIT, UNITS, BitProbe, NoEstimateError
from kvd.worker.serving.calibration import LayerLoss
from kvd.worker.serving.model_files import LoadedModel
from kvd.worker.serving.probe import UnknownCacheError
from kvd.worker.serving.runner import Runner
from kvd.worker.tools import fidelity

_DENSE = Scheme(16, 16)
_WORST_KL = 1000.0
"""Loss in nats of a layer whose measurement is not finite: more than any finite one."""
_PROBE_MEMORY = 1 << 30
"""Most bytes that the estimate holds."""

_log = logging.getLogger("kvd.worker")


def layers_of(layout: Layout) -> list[int]:
    """Return the entries of the layout that keep keys and values."""
    return list(dict.fromkeys(entry for entry, _ in layout.attention()))


def estimate(loaded: LoadedModel) -> dict[int, LayerLoss]:
    """Return an estimate for each layer that keeps keys and values, from the model's gradients.

    It costs less than measuring one layer, and ranks layers well. Empty if there is no estimate.
    """
    unit = CPU_UNIT if on_cpu() else UNITS[0]
    try:
        probe = BitProbe(loaded.model, text_ids(loaded), unit=unit, memory=_PROBE_MEMORY)
        while probe.units:
            probe.advance()
        costs = probe.costs()
    except (UnknownCacheError, NoEstimateError, MemoryError) as failed:
        _log.info("all layers are measured, because they cannot be estimated: %s", failed)
        return {}
    sides = [(cost.layer, cost.sides()) for cost in costs]
    return {
        layer: LayerLoss(
            layer=layer, keys={**one.keys.losses}, values={**one.values.losses}, estimated=True
        )
        for layer, one in sides
    }


def delicate(layers: Sequence[int], estimates: Mapping[int, LayerLoss]) -> list[int]:
    """Return the half of the layers that are estimated to lose most, and those not estimated."""
    known = [layer for layer in layers if layer in estimates]

    def loss(layer: int) -> float:
        return sum(max(side.values()) for side in (estimates[layer].keys, estimates[layer].values))

    spared = sorted(known, key=loss)[: len(known) // 2]
    return [layer for layer in layers if layer not in spared]


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
    own.use(cache.stores[0].page_product, cache.backend)
    # Without decoded tokens: a prompt's own are enough to compare layers, and take less time.
    whole = map(_without_short_end, prompts)
    found = fidelity.measure([Runner(runner.model, own)], whole, decoded=0)
    kls = [one.kl if math.isfinite(one.kl) else _WORST_KL for one in found]
    keys = dict(zip(MEASURED, kls[: len(MEASURED)], strict=True))
    values = dict(zip(MEASURED, kls[len(MEASURED) :], strict=True))
    return LayerLoss(layer=entry, keys=keys, values=values)


def _without_short_end(prompt: Sequence[int]) -> Sequence[int]:
    """Drop the last chunk if it is shorter than a page: it would take as long as a whole one."""
    rest = (len(prompt) - 1) % fidelity.CHUNK
    is_short = rest < PAGE_TOKENS and len(prompt) > 2 * fidelity.CHUNK
    return prompt[: len(prompt) - rest] if is_short else prompt


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
