"""What this worker's rows cost, told to the daemon: its forecasts count as the worker does."""

from __future__ import annotations

from kvd.worker.cache.layout import Access
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from protocol.costs import Costs, KVCost


def costs_of(
    cache: ModelCache | MlxLmCache, *, weights: int, base: int, row: int, first: int, step: int
) -> Costs | None:
    """Return the costs; None where a row takes what no formula of its length says.

    ``row``: bytes of every row beside its pages; ``first``: units of an idle worker; ``step``:
    tokens that are prefilled at once. Models that read rectangles take scratch by the rows that
    run together.
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
