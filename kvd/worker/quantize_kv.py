"""Quantized, paged caches for a model in mlx-lm, without the daemon: one call installs them.

::

    from kvd.worker.quantize_kv import install, quantize_kv

    install()                                  # before mlx-lm imports the model's module
    model, tokenizer = mlx_lm.load(path)
    quantize_kv(model, "k8v4")

From then on everything in mlx-lm that makes caches for this model makes ours: `generate`,
`stream_generate`, `BatchGenerator`, its server. Does not cover: budgets, admission, the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvd.worker import seam
from kvd.worker.cache.dropin import (
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    ladder_of,
)
from kvd.worker.cache.kinds import FULL, Kind
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.shared import SharedStore
from protocol.errors import UnsupportedModel

Maker = Callable[[], Any]
"""Makes an empty cache for one layer."""


def install() -> None:
    """Make mlx-lm's models able to use our caches, and its `load_prompt_cache` to read them.

    Must run before a model's module is imported; raises ``RuntimeError`` if one has been.
    """
    seam.install()
    for kind in (BatchQuantizedKVCache, BatchQuantizedRotatingKVCache):
        # `load_prompt_cache` looks classes up by name among its own.
        setattr(upstream, kind.__name__, kind)


class QuantizedKV:
    """The caches of one model: makes them, and knows what all of them together hold."""

    def __init__(self, makers: list[Maker], stores: list[SharedStore]) -> None:
        self._makers = makers
        self._stores = stores

    def make_cache(self) -> list[Any]:
        """Return empty caches for one sequence, one a layer."""
        return [make() for make in self._makers]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and tails, used or free, of all caches that are alive."""
        return sum(store.nbytes for store in self._stores)


def quantize_kv(
    model: Any,
    scheme: str | Scheme = "k8v4",
    *,
    group_size: int = 64,
    quantized_kv_start: int = 0,
    max_kv_size: int | None = None,
) -> QuantizedKV:
    """Install our caches as the model's own; again to change the scheme for new caches.

    ``scheme`` is such as ``"k8v4"``, ``group_size`` 32, 64 or 128 (keys: at most 64). A sequence is
    quantized from ``quantized_kv_start`` tokens on. ``max_kv_size`` bounds, as in mlx-lm, the
    layers of models that make no caches of their own; four first tokens stay.

    Raises `UnsupportedModel` if the model keeps anything else, or works on its keys and values
    itself; ``ValueError`` for a scheme that does not exist; ``RuntimeError`` as `install`.
    """
    install()
    ladder = ladder_of(scheme, group_size, quantized_kv_start)
    own = model.__dict__.get("make_cache")
    if isinstance(getattr(own, "__self__", None), QuantizedKV):
        del model.make_cache
    stores: list[SharedStore] = []

    def shared(kind: Kind) -> SharedStore:
        stores.append(SharedStore(ladder, kind, quantized_start=quantized_kv_start, home=True))
        return stores[-1]

    installed = QuantizedKV(
        [_maker(cache, shared) for cache in make_prompt_cache(model, max_kv_size)], stores
    )
    _try(model, installed, stores)
    model.make_cache = installed.make_cache
    return installed


def _maker(cache: Any, shared: Callable[[Kind], SharedStore]) -> Maker:
    """Return what makes our counterpart of one of mlx-lm's caches."""
    store: SharedStore
    if type(cache) is KVCache:
        store = shared(FULL)
        return lambda: BatchQuantizedKVCache.on(store)
    if type(cache) is RotatingKVCache:
        store = shared(Kind(window=cache.max_size, keep=cache.keep))
        return lambda: BatchQuantizedRotatingKVCache.on(store)
    if type(cache) is ArraysCache:
        size = len(cache.cache)
        return lambda: ArraysCache(size)
    if type(cache) is CacheList:
        makers = [_maker(one, shared) for one in cache.caches]
        return lambda: CacheList(*(make() for make in makers))
    raise UnsupportedModel(
        f"this model keeps a {type(cache).__name__} for some layers, which has no pages",
        caches=[type(cache).__name__],
    )


def _try(model: Any, installed: QuantizedKV, stores: list[SharedStore]) -> None:
    """Read two tokens and decode one: a model that touches its keys fails here, not later."""
    caches = installed.make_cache()
    try:
        for tokens in ([[0, 0]], [[0]]):
            mx.eval(model(mx.array(tokens), cache=caches))
    except (TypeError, AttributeError, IndexError, RuntimeError) as touched:
        raise UnsupportedModel(
            f"the model works on its keys and values itself, which pages do not allow: {touched}"
        ) from touched
    for store in stores:
        store.keeps_reading = store.asked_again
