"""What this worker's rows cost, for the daemon's forecasts."""

from __future__ import annotations

from kvd.worker.cache.layout import Access
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from protocol.costs import Costs, KVCost


def costs_of(
    cache: ModelCache | MlxLmCache, *, weights: int, base: int, row: int, first: int, step: int
) -> Costs | None:
    """Return the costs; None if a row's memory is no function of its length.

    ``row``: bytes of every row besides its pages. ``first``: units of an idle worker. ``step``:
    tokens prefilled at once. Models with `Access.RECTANGLES` need scratch that depends on the rows
    of the batch.
    """
    kinds = []
    if isinstance(cache, ModelCache):
        if Access.RECTANGLES in cache.access.values():
            return None
        kinds = [
            KVCost(
                window=store.kind.window,
                keep=store.kind.keep,
                chunk=store.kind.chunk,
                layers=len(store.layers),
                page_bytes=tuple(store.pages.page_bytes(level) for level in store.pages.levels),
                charges=tuple(store.pages.charge(level) for level in store.pages.levels),
            )
            for store in cache.stores
        ]
    return Costs(
        weights_bytes=weights,
        base_bytes=base,
        unit_bytes=cache.costs.unit_bytes,
        row_bytes=row,
        first_units=first,
        step=step,
        levels=cache.levels,
        dense_until=cache.settings.quantized_start if isinstance(cache, ModelCache) else 0,
        kinds=kinds,
        own_token_bytes=0 if isinstance(cache, ModelCache) else cache.costs.token_bytes,
    )
