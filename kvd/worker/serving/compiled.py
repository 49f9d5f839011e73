"""Decode steps as compiled functions: the host builds a step's graph once per shape.

A decode step of a small model has about a thousand small operations. Building them in Python takes
as long as running them. Here the step is a function of arrays only (tokens, the step's tables,
tails and pools), which `mx.compile` traces once, fuses, and replays. A trace's key contains
everything that would change it: the number of rows, of pages on each level (rounded up, so that
there are few shapes; padding is never read) and of slots in tails and pools. Steps that get views
of the pools (`PagePool.views`) do not depend on the slots of pools.

Fused or not, an element is computed by the same operations in the same order. So a row gets the
same numbers from a compiled step as from a plain one; a test verifies this to the bit on the CPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.layout import Access
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import PageIndex
from kvd.worker.cache.padded_sizes import padded_work
from kvd.worker.cache.page_tables import LevelTable
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.steps import DecodeStep
from kvd.worker.cache.store import KVStore
from protocol.memory_bounds import MAX_TRACES

Arrays = list[mx.array]


def obstacle(cache: Any) -> str:
    """Return why a step over this cache depends on more than arrays; empty if it does not."""
    if not isinstance(cache, ModelCache):
        return "the model uses mlx-lm's own caches"
    if not cache.batched:
        return "the model takes one row per pass"
    if cache.states.parts:
        return "the model has recurrent states"
    if any(access is not Access.PAGES for access in cache.access.values()):
        return "the model reads its keys and values as plain arrays"
    return ""


class CompiledDecode:
    """One model's decode steps. Call it between the cache's `begin_decode` and `end_pass`."""

    def __init__(self, model: Any, cache: ModelCache) -> None:
        self._model = model
        self._cache = cache
        self._traces: OrderedDict[tuple[Any, ...], _Trace] = OrderedDict()

    def __call__(self, tokens: mx.array) -> mx.array:
        """Run the step for tokens, ``[batch]``; return logits ``[batch, vocab]``, lazy."""
        parts = [_Part.of(store) for store in self._cache.stores]
        inputs = [tokens, *(array for part in parts for array in part.arrays(views=True))]
        key = tuple(part.key for part in parts)
        logits, tails = self._called(self._function(key, parts), inputs)
        left = iter(tails)
        for part in parts:
            for layer in part.store.layers:
                _put_tails(layer, left)
        return logits

    def _function(self, key: tuple[Any, ...], parts: list[_Part]) -> _Trace:
        if key not in self._traces:
            traced = _Traced(self._model, self._cache)
            self._traces[key] = _Trace(traced, mx.compile(traced))
            if len(self._traces) > MAX_TRACES:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        trace = self._traces[key]
        trace.traced.parts = parts
        return trace

    def _called(self, trace: _Trace, inputs: Arrays) -> tuple[mx.array, Arrays]:
        """Replay or create a trace, and count the kernels that it launches."""
        backend = self._cache.backend
        if backend is None:
            return trace.function(inputs)
        before = backend.launched()
        found = trace.function(inputs)
        if new := backend.launched() - before:
            trace.launches = new
        else:
            backend.launched(trace.launches)
        return found


@dataclass(frozen=True)
class _Part:
    """One store's part of a step."""

    store: KVStore
    step: DecodeStep

    @staticmethod
    def of(store: KVStore) -> _Part:
        step = store.step
        if not isinstance(step, DecodeStep):
            raise TypeError("no decode step is under way")
        if step.backend is not None:
            return _Part(store, replace(step, backend=step.backend.padded()))
        tables = [table.padded(padded_work(len(table.owners))) for table in step.tables]
        return _Part(store, _with_tables(step, tables))

    @property
    def key(self) -> tuple[Any, ...]:
        """What a trace depends on: everything that determines the shapes of its arrays."""
        step = self.step
        capacities = tuple(
            layer.pools[level].capacities
            if step.backend is None
            else layer.pools[level].view_capacities
            for layer in self.store.layers
            for level in self.levels
        )
        tails = self.store.layers[0].tail_keys.shape[0]
        sizes = (step.batch, len(step.rows), tails, self.levels, capacities)
        if step.backend is not None:
            return *sizes, *step.backend.shapes(step)
        pages = tuple(len(table.owners) for table in self.step.tables)
        masks = [step.visible_pages(table) for table in self.step.tables]
        mask_shapes = tuple(None if mask is None else mask.shape for mask in masks)
        return *sizes, step.all_tails, pages, mask_shapes

    @property
    def levels(self) -> tuple[int, ...]:
        if self.step.backend is not None:
            return self.step.backend.pages.levels
        return tuple(table.level for table in self.step.tables)

    def arrays(self, *, views: bool = False) -> Arrays:
        """Return all arrays that the step reads, in the order of `put`.

        ``views``: `PagePool.views` if kernels read the pools, which take only their addresses.
        """
        step = self.step
        of_pool = PagePool.views if views and step.backend is not None else PagePool.arrays
        found = self._addresses() if step.backend is None else step.backend.arrays(step)
        for layer in self.store.layers:
            found += [layer.tail_keys, layer.tail_values]
            for level in self.levels:
                found += of_pool(layer.pools[level])
        return found

    def _addresses(self) -> Arrays:
        step = self.step
        found = [step.slots, step.token_places, step.offsets, step.visible_tails()]
        if step.token_rows is not None:
            found.append(step.token_rows)
        for table in self.step.tables:
            found += [table.slots, table.rows]
            for heads in self._heads:
                for index in table.indices(heads):
                    found += [index.left, index.right]
            if (seen := step.visible_pages(table)) is not None:
                found.append(seen)
        return found

    def put(self, given: Iterator[mx.array]) -> None:
        self.store.step = self._redescribed(given)
        for layer in self.store.layers:
            _put_tails(layer, given)
            for level in self.levels:
                layer.pools[level].put(given)

    def _redescribed(self, given: Iterator[mx.array]) -> DecodeStep:
        step = self.step
        if step.backend is not None:
            return step.backend.with_arrays(step, given)
        slots, places, offsets, tails = (next(given) for _ in range(4))
        token_rows = None if step.token_rows is None else next(given)
        shared: dict[str, Any] = {"offsets": offsets, "tails": tails}
        tables = []
        for table in self.step.tables:
            page_slots, rows = next(given), next(given)
            indices = {}
            for heads in self._heads:
                by_row, by_page = (PageIndex(next(given), next(given)) for _ in range(2))
                indices[heads] = by_row, by_page
            tables.append(table.with_arrays(page_slots, rows, indices))
            visible = None if step.visible_pages(table) is None else next(given)
            shared[step.pages_key(table)] = visible
        step = replace(step, slots=slots, token_places=places, token_rows=token_rows, shared=shared)
        return _with_tables(step, tables)

    @property
    def _heads(self) -> list[int]:
        return sorted({layer.geometry.kv_heads for layer in self.store.layers})


class _Traced:
    """The function that is traced: puts the tracers where the model's layers read."""

    def __init__(self, model: Any, cache: ModelCache) -> None:
        self._model = model
        self._cache = cache
        self.parts: list[_Part] = []

    def __call__(self, inputs: Arrays) -> tuple[mx.array, Arrays]:
        before = [array for part in self.parts for array in part.arrays()]
        given = iter(inputs)
        tokens = next(given)
        try:
            for part in self.parts:
                part.put(given)
            logits = self._model(tokens[:, None], cache=self._cache.views([]))[:, -1]
            layers = [layer for part in self.parts for layer in part.store.layers]
            tails = [tail for layer in layers for tail in (layer.tail_keys, layer.tail_values)]
        finally:
            real = iter(before)
            for part in self.parts:
                part.put(real)
                part.store.step = part.step
        return logits, tails


@dataclass
class _Trace:
    """A traced function, compiled."""

    traced: _Traced
    function: Callable[[Arrays], tuple[mx.array, Arrays]]
    launches: int = 0


def _with_tables(step: DecodeStep, tables: list[LevelTable]) -> DecodeStep:
    return replace(step, build_tables=lambda: tables)


def _put_tails(layer: LayerStore, given: Iterator[mx.array]) -> None:
    layer.tail_keys, layer.tail_values = next(given), next(given)
