"""Forward passes of one model over the page cache: tokens in, logits out.

Knows nothing of requests, sampling or memory budgets. Everything runs on the calling thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvd.worker.cache.batch import make_caches
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore
from protocol.errors import UnsupportedModel

CPU_BATCH = 16
"""On the CPU, batches are padded to a multiple of this.

BLAS picks another kernel, with another rounding, for products of fewer than 16 rows (measured
with OpenBLAS 0.3.21); padded, a row's logits are the same to the bit whoever shares its batch.
"""


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU here."""
    return mx.default_device().type == mx.DeviceType.cpu


def probe_geometry(model: Any) -> tuple[list[LayerGeometry], mx.Dtype]:
    """Find out each layer's keys and values by a forward pass of one token.

    Raises `UnsupportedModel` for models whose layers do not all have a plain attention cache.
    """
    caches = make_prompt_cache(model)
    others = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if others:
        raise UnsupportedModel(
            f"this model keeps {', '.join(others)} for some layers; this version of kvd serves"
            " models with full attention in all layers",
            caches=others,
        )
    mx.eval(model(mx.array([[0]]), cache=caches))
    layers = []
    for cache in caches:
        _, heads, _, k_dim = cache.keys.shape
        layers.append(LayerGeometry(heads, k_dim, cache.values.shape[-1], cache.keys.dtype.size))
    return layers, caches[0].keys.dtype


class Runner:
    """A model and its store."""

    def __init__(self, model: Any, store: KVStore) -> None:
        self.model = model
        self.store = store
        self._caches = make_caches(store)
        self._multiple = CPU_BATCH if on_cpu() else 1

    @classmethod
    def of(cls, model: Any, scheme: Scheme, *, prefill_scratch: int) -> Runner:
        """Make a runner with a store of the model's own geometry."""
        layers, dtype = probe_geometry(model)
        return cls(model, KVStore(layers, scheme, dtype, prefill_scratch=prefill_scratch))

    def prefill(self, row: Row, tokens: list[int]) -> None:
        """Run a chunk of a prompt into the row; evaluated and flushed when it returns.

        The device must be idle. Logits are neither needed nor computed.
        """
        self.store.begin_prefill(row, len(tokens))
        self.model(mx.array([tokens]), cache=self._caches)
        self.store.finish_prefill()

    def decode(self, rows: list[Row], tokens: mx.array) -> mx.array:
        """Run one token of each row, ``[rows]`` int32; return logits ``[rows, vocab]``, lazy.

        Call `KVStore.flush` before where `KVStore.needs_flush` says so. Evaluate the result
        together with `KVStore.arrays`.
        """
        count = len(rows)
        batch = -(-count // self._multiple) * self._multiple
        self.store.begin_decode(rows, batch)
        if batch > count:
            tokens = mx.concatenate([tokens, mx.zeros((batch - count,), tokens.dtype)])
        logits: mx.array = self.model(tokens[:, None], cache=self._caches)
        return logits[:count, -1]
