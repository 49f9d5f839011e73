"""Describes a model's cache for ``status``, and its memory costs for the daemon's forecasts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from msgspec import structs

from kvd.worker.cache.layout import Access
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.store import KVStore
from kvd.worker.device import on_cpu
from kvd.worker.serving import fast_paths
from kvd.worker.serving.probe import Served
from protocol.costs import Costs, KVCost
from protocol.types import FastPath, FastPathCause, FastPathName, KVPart

PREFILL_CHUNK = 256
_VERY_LONG = 1 << 40


def parts(served: Served, at_once: int = PREFILL_CHUNK, ranks: int = 1) -> list[KVPart]:
    """Return how each kind of a model's layers keeps earlier tokens, in bytes of all ranks.

    ``at_once``: tokens of a row prefilled in one pass. A window temporarily holds their pages, too.
    """
    return [
        structs.replace(
            part,
            bytes_per_token=ranks * part.bytes_per_token,
            bound_bytes=ranks * part.bound_bytes,
        )
        for part in _parts(served, at_once)
    ]


def _parts(served: Served, at_once: int) -> list[KVPart]:
    cache = served.runner.cache
    if isinstance(cache, MlxLmCache):
        return [_own(cache, next(iter(served.reasons.values()), ""))]
    found = [
        _attention(cache, store, access, served.reasons.get(kind, ""), at_once)
        for (kind, access), store in zip(cache.access.items(), cache.stores, strict=True)
    ]
    states = list(cache.layout.states())
    if states:
        found.append(
            KVPart(
                kind="recurrent",
                layers=len(states),
                path="state",
                scheme="dense",
                batched=cache.batched,
                bound_bytes=cache.states.row_bytes,
            )
        )
    return found


def _attention(
    cache: ModelCache, store: KVStore, access: Access, reason: str, chunk: int
) -> KVPart:
    level = 1 if store.quantized_start else 0
    schemes = {layer.pools[level].scheme.name for layer in store.layers}
    bounded = store.kind.bounded
    return KVPart(
        kind=store.kind.name,
        layers=len(store.layers),
        path="pages" if access is Access.PAGES else "dequantize-on-read",
        scheme=" ".join("dense" if name == "k16v16" else name for name in sorted(schemes)),
        batched=cache.batched,
        reason=reason,
        bytes_per_token=0 if bounded else store.pages.page_bytes(level) // PAGE_TOKENS,
        bound_bytes=_most_held(store, chunk) if bounded else 0,
    )


def _most_held(store: KVStore, chunk: int) -> int:
    """Return the most bytes of pages and tail that one row of a bounded kind holds.

    Unlike `KVStore.most_bytes`, this does not count the copies made when pools grow.
    """
    first = 1 if store.quantized_start else 0
    pages = store.kind.max_pages(_VERY_LONG, chunk) * store.pages.page_bytes(first)
    if first:
        dense = store.kind.max_pages(store.quantized_start + chunk, chunk)
        # Temporarily both: dense pages, and the quantized pages they become.
        pages = max(pages, dense * (store.pages.page_bytes(0) + store.pages.page_bytes(1)))
    return pages + store.tails.row_bytes


def _own(cache: MlxLmCache, reason: str) -> KVPart:
    return KVPart(
        kind="full",
        layers=len(cache.new_caches()),
        path="dense",
        scheme="dense",
        batched=False,
        reason=reason,
        bytes_per_token=cache.costs.token_bytes,
        bound_bytes=0 if cache.costs.token_bytes else cache.row_bytes,
    )


def schemes(cache: ModelCache | MlxLmCache) -> list[str]:
    if not isinstance(cache, ModelCache) or not cache.stores:
        return []
    return [scheme.name for scheme in cache.settings.schemes]


def mixes(cache: ModelCache | MlxLmCache) -> dict[str, list[str]]:
    """Return the schemes by layer of the precision levels that mix several."""
    if not isinstance(cache, ModelCache) or not cache.stores:
        return {}
    settings = cache.settings
    pairs = zip(settings.schemes, settings.mixes, strict=False)
    return {scheme.name: [one.name for one in mix] for scheme, mix in pairs if mix}


def paths(served: Served, native: str | None) -> list[FastPath]:
    """Return the fast paths of a load; ``native``: `ModelInfo.native`, None on accelerators."""
    found = []
    if native is not None and on_cpu():
        cause: FastPathCause = "switched_off" if native == "switched off" else "error"
        found.append(_path("native library", cause, None if native == "on" else native))
    if served.layers is not None:
        found.append(served.layers)
    if (fused := served.fused) is not None:
        found.append(_path("fused attention", fused.cause, fused.reason))
    return [*found, *served.runner.paths.values()]


def _path(name: FastPathName, cause: FastPathCause, reason: str | None) -> FastPath:
    if reason is None:
        return fast_paths.used(name)
    return fast_paths.declined(name, cause, reason)


def layout(cache: ModelCache | MlxLmCache) -> str:
    stores = cache.stores if isinstance(cache, ModelCache) else []
    per_token = {
        pool.value_packing.per_token
        for store in stores
        for layer in store.layers
        for pool in layer.pools[-1:]
        if layer.geometry.v_dim
    }
    if not stores or cache.scheme.name == "k16v16":
        return "not quantized"
    values = {True: "per token", False: "per channel"}
    found = " or ".join(values[is_per_token] for is_per_token in sorted(per_token, reverse=True))
    return f"keys per channel, values {found}" if found else "keys per channel"


def dtype_name(model: Any) -> str:
    counts: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            counts[name] = counts.get(name, 0) + array.size
    return max(counts, key=lambda name: counts[name], default="float32")


def costs_of(
    cache: ModelCache | MlxLmCache,
    *,
    weights: int,
    base: int,
    row: int,
    first: int,
    step: int,
    ranks: int = 1,
) -> Costs | None:
    """Return the costs; None if a row's memory does not depend on its length alone.

    That is so with `Access.RECTANGLES`, whose scratch depends on the rows of the batch. ``row``:
    bytes of every row besides its pages. ``first``: page units that an idle worker keeps.
    ``step``: most tokens of one prompt that are prefilled at once. ``ranks``: processes that have a
    cache like this one; the costs are their sums.
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
                page_bytes=tuple(
                    ranks * store.pages.page_bytes(level) for level in store.pages.levels
                ),
                charges=tuple(ranks * store.pages.charge(level) for level in store.pages.levels),
            )
            for store in cache.stores
        ]
    return Costs(
        weights_bytes=weights,
        base_bytes=base,
        unit_bytes=ranks * cache.costs.unit_bytes,
        row_bytes=row,
        first_units=first,
        step=step,
        levels=cache.levels,
        dense_until=cache.settings.quantized_start if isinstance(cache, ModelCache) else 0,
        kinds=kinds,
        own_token_bytes=0 if isinstance(cache, ModelCache) else cache.costs.token_bytes,
    )
