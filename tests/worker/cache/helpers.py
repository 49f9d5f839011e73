"""A test bench for one `KVStore`: random rows, and dense copies that its pages must agree with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvd.worker.cache import packed as pk
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.batch import BatchQuantizedKVCache, make_caches
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Packing, Scheme, full_pages
from kvd.worker.cache.store import KVStore
from tests.worker.cache.invariants import check_store


def through_page(dense: mx.array, packing: Packing) -> mx.array:
    """Quantize and dequantize a page, ``[64, dim]`` or ``[heads, 64, dim]``, with MLX only."""
    if packing.bits == 16:
        return dense
    how = {"group_size": packing.group, "bits": packing.bits}
    x = dense if packing.per_token else dense.swapaxes(-1, -2)
    y = mx.dequantize(*mx.quantize(x, **how), **how)
    return y if packing.per_token else y.swapaxes(-1, -2)


@lru_cache(maxsize=1024)
def _through(
    dense: bytes, shape: tuple[int, int, int], packings: tuple[Packing, ...]
) -> np.ndarray:
    """Quantize a page, given as bytes, with each packing in turn. Cached, as tests repeat pages."""
    page = mx.array(np.frombuffer(dense, np.float32).reshape(shape))
    for packing, _ in itertools.groupby(packings):  # an equal packing changes nothing
        page = through_page(page, packing)
    return np.array(page)


@dataclass
class DenseRow:
    """A row's true keys and values, and what its pages should contain."""

    row: Row
    keys: list[np.ndarray] = field(default_factory=list)
    """For each layer, ``[heads, length, dim]``."""
    values: list[np.ndarray] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    """For each page, the levels that it has been on, in order."""

    def step_down(self, level: int) -> None:
        for path in self.paths:
            if path[-1] < level:
                path.append(level)

    def shown(self, layer: int, store: KVStore) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values that attention should see: full pages are quantized."""
        pools = store.layers[layer].pools
        self.paths += [
            [self.row.level] for _ in range(full_pages(self.row.length) - len(self.paths))
        ]
        sides = []
        for dense, packings in (
            (self.keys[layer], [pool.key_packing for pool in pools]),
            (self.values[layer], [pool.value_packing for pool in pools]),
        ):
            out = dense.copy()
            for index, path in enumerate(self.paths):
                here = slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
                page = out[:, here]
                taken = tuple(packings[level] for level in path)
                out[:, here] = _through(page.tobytes(), page.shape, taken)
            sides.append(out)
        return sides[0], sides[1]


class Bench:
    """A store with a dense model of it, driven by random keys and values."""

    backend: ClassVar[Backend | None] = None
    """Backend of all steps. None selects plain operations."""

    def __init__(
        self,
        geometry: LayerGeometry | None = None,
        scheme: Scheme | list[Scheme] | None = None,
        layers: int = 2,
        seed: int = 0,
        layer_schemes: list[list[Scheme]] | None = None,
        kind: Kind = FULL,
        quantized_start: int = 0,
    ) -> None:
        geometry = geometry or LayerGeometry(kv_heads=2, k_dim=64, v_dim=64)
        self.geometry = geometry
        self.store = KVStore(
            [geometry] * layers,
            scheme or Scheme(8, 8),
            mx.float32,
            layer_schemes=layer_schemes,
            kind=kind,
            quantized_start=quantized_start,
        )
        self.store.backend = self.backend
        self.caches: list[BatchQuantizedKVCache] = make_caches(self.store)
        self.rng = np.random.default_rng(seed)
        self.rows: list[DenseRow] = []

    def random(self, tokens: int, dim: int) -> np.ndarray:
        g = self.geometry
        # Channels differ in size and offset, like those of real keys.
        shape = (g.kv_heads, tokens, dim)
        return (self.rng.normal(size=shape) * np.linspace(0.3, 2.0, dim) + 0.2).astype(np.float32)

    def new(self, length: int = 0, chunk: int = 256) -> DenseRow:
        dense = DenseRow(self.store.new_row())
        layers = len(self.store.layers)
        dense.keys = [
            np.zeros((self.geometry.kv_heads, 0, self.geometry.k_dim), np.float32)
        ] * layers
        dense.values = [
            np.zeros((self.geometry.kv_heads, 0, self.geometry.v_dim), np.float32)
        ] * layers
        self.rows.append(dense)
        done = 0
        while done < length:
            count = min(chunk - done % chunk, length - done)
            self.prefill(dense, count)
            done += count
        return dense

    def _add(self, dense: DenseRow, layer: int, tokens: int) -> tuple[mx.array, mx.array]:
        k, v = self.random(tokens, self.geometry.k_dim), self.random(tokens, self.geometry.v_dim)
        dense.keys[layer] = np.concatenate([dense.keys[layer], k], axis=1)
        dense.values[layer] = np.concatenate([dense.values[layer], v], axis=1)
        return mx.array(k)[None], mx.array(v)[None]

    def prefill(self, dense: DenseRow, count: int) -> list[object]:
        self.store.begin_prefill(dense.row, count)
        handles = []
        for layer, cache in enumerate(self.caches):
            handles.append(cache.update_and_fetch(*self._add(dense, layer, count))[0])
        self.store.finish_prefill()
        return handles

    def decode(self, denses: list[DenseRow], batch: int | None = None) -> list[object]:
        """Decode one step, after a flush if a tail is full. Returns the layers' handles."""
        if self.store.needs_flush([dense.row for dense in denses]):
            mx.eval(self.store.arrays())
            self.store.flush()
        batch = batch or len(denses)
        self.store.begin_decode([dense.row for dense in denses], batch)
        handles = []
        for layer, cache in enumerate(self.caches):
            pairs = [self._add(dense, layer, 1) for dense in denses]
            k, v = (mx.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
            if batch > len(denses):
                pad = batch - len(denses)
                k = mx.concatenate([k, mx.full((pad, *k.shape[1:]), 7.0)])
                v = mx.concatenate([v, mx.full((pad, *v.shape[1:]), 7.0)])
            handles.append(cache.update_and_fetch(k, v)[0])
        return handles

    def drain(self) -> None:
        """Wait for the step in flight, then flush."""
        mx.eval(self.store.arrays())
        self.store.flush()

    def free(self, dense: DenseRow) -> None:
        mx.eval(self.store.arrays())
        self.store.free(dense.row)
        self.rows.remove(dense)

    def check(self) -> None:
        check_store(self.store)
        for dense in self.rows:
            assert dense.row.length == dense.keys[0].shape[1]
            for layer in range(len(self.store.layers)):
                keys, values = self.store.read(dense.row, layer)
                held = self.store.positions(dense.row)
                want_keys, want_values = (side[:, held] for side in dense.shown(layer, self.store))
                np.testing.assert_allclose(np.array(keys), want_keys, rtol=0, atol=1e-6)
                np.testing.assert_allclose(np.array(values), want_values, rtol=0, atol=1e-6)


__all__ = ["Bench", "DenseRow", "pk"]
