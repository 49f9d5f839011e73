"""Prefill attention: dequantizes one layer of one row for the dense kernel, in parts if needed.

The dense kernel is `mx.fast.scaled_dot_product_attention`. The chunk attends to its own tokens
unquantized, and to earlier tokens as the cache stores them. The memory in use at once stays within
the store's scratch, however long the row is (`tiles`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import mlx.core as mx

from kvd.worker.attention.online import OnlineSoftmax
from kvd.worker.attention.tiles import Plan, Work, plan
from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.batch import PrefillHandle
from kvd.worker.cache.packed import Packed, Slots, unpacking_bytes
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.device import on_cpu

Tile = tuple[mx.array, mx.array, mx.array | None]
"""Keys ``[k_dim, n]`` and values ``[n, v_dim]`` of one head, and a mask of the keys that each query
sees, ``[queries, n]``; None: all."""
Copies = dict[int, tuple[tuple[int, ...], tuple[mx.array, mx.array]]]
"""Dense keys and values of pages, ``[pages, heads, 64, dim]``, and their positions, by source.

Chunks see different pages through a window, so only the newest chunk's copy is kept."""


def prefill_attention(
    queries: mx.array,
    handle: PrefillHandle,
    scale: float,
    sinks: mx.array | None = None,
    *,
    pending: Sequence[mx.array] = (),
    copies: Copies | None = None,
) -> mx.array:
    """Attend a chunk's queries, ``[1, q_heads, count, k_dim]``, causally.

    Without a backend, ``queries`` may be longer than the step's tokens. The extra queries are
    padding; if they are finite, so is their output. ``sinks``: ``[q_heads]`` logits of gpt-oss's
    attention sinks. ``pending``: lazy results of other chunks of the pass, to evaluate when the
    scratch is full. ``copies``: dense copies of pages, shared with other chunks of the row.

    Returns ``[1, q_heads, count, v_dim]``: lazy if everything fits the scratch at once, otherwise
    evaluated part by part.
    """
    if handle.step.backend is not None:  # backends need no scratch that grows with the row
        return handle.step.backend.attend(queries, handle.layer, handle.chunk, scale, sinks)
    task, cut = _planned(_Task.of(queries, handle, scale, sinks, pending, copies))
    if task.fits_one_call(cut):
        task.make_room(cut, queries, handle.chunk.keys, handle.chunk.values)
        return _dense(task, slice(0, task.work.kv_heads))
    if task.padding and cut.keys is not None:  # only the dense kernel needs padding
        own = queries[:, :, : handle.step.count]
        attended = prefill_attention(own, handle, scale, sinks, pending=pending, copies=copies)
        return mx.pad(attended, [(0, 0), (0, 0), (0, task.padding), (0, 0)])
    return _in_parts(task, cut)


def starts_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    handle: PrefillHandle,
    scale: float,
    sinks: mx.array | None = None,
    *,
    at_once: int,
    pending: Sequence[mx.array] = (),
) -> list[mx.array] | None:
    """Attend the first chunks of several rows, ``[chunks, heads, tokens, dim]``, causally.

    Shorter chunks are padded at their end. ``handle``: that of one chunk. ``at_once``: most chunks
    in one call of the dense kernel. For the rest, see `prefill_attention`.

    Returns parts of ``[chunks, q_heads, tokens, v_dim]``, lazy as far as the scratch allows; None:
    a chunk does not fit one call of the dense kernel.
    """
    task, cut = _planned(_Task.of(queries[:1], handle, scale, sinks, pending))
    if not task.fits_one_call(cut):
        return None
    found: list[mx.array] = []
    most = min(at_once, max(1, handle.store.scratch.limit // cut.nbytes))
    for first in range(0, queries.shape[0], most):
        some = slice(first, first + most)
        count = queries[some].shape[0]
        task.make_room(replace(cut, nbytes=count * cut.nbytes), queries, keys, values, *found)
        found.append(_attended(task, queries[some], keys[some], values[some], sinks))
    return found


def _planned(task: _Task) -> tuple[_Task, Plan]:
    """Choose the dense kernel, and the parts of the work that fit the scratch."""
    scratch = task.handle.store.scratch.limit
    cut = plan(task.work, scratch)
    # A fused kernel makes no matrix of scores, so more lazy layers fit the scratch.
    if (not task.fits_one_call(cut) or not on_cpu()) and task.is_fused_available():
        task = replace(task, work=replace(task.work, fused=True))
        cut = plan(task.work, scratch)
    return task, cut


@dataclass(frozen=True)
class _Pages:
    """Pages of one level."""

    pool: PagePool
    slots: Slots
    starts: tuple[int, ...]
    source: tuple[Packed, Packed] | None = None
    """Pages that are not in the pool yet, because an earlier chunk of the pass fills them."""

    def read(self, heads: slice) -> tuple[mx.array, mx.array]:
        return self.pool.read(self.slots, heads, self.source)

    def read_all(self, copies: Copies | None) -> tuple[mx.array, mx.array]:
        """Read all heads, or return the copy that another chunk of the row has read."""
        if copies is None:
            return self.read(slice(None))
        key = id(self.pool if self.source is None else self.source[0][0])
        if key not in copies or copies[key][0] != self.starts:
            copies[key] = self.starts, self.read(slice(None))
        return copies[key][1]

    @property
    def unpacking(self) -> int:
        """Bytes per element that `read` needs, besides its input and output."""
        packings = (self.pool.key_packing, self.pool.value_packing)
        return max(unpacking_bytes(one.bits, self.pool.dtype.size) for one in packings)

    def some(self, which: list[int]) -> _Pages:
        if len(which) == len(self.starts):
            return self
        starts = tuple(self.starts[index] for index in which)
        return replace(self, slots=self.slots.some(which), starts=starts)


@dataclass(frozen=True)
class _Task:
    """A chunk's queries, and everything they attend to in one layer."""

    queries: mx.array
    scale: float
    sinks: mx.array | None
    handle: PrefillHandle
    pages: list[_Pages]
    work: Work
    pending: Sequence[mx.array]
    copies: Copies | None

    @classmethod
    def of(
        cls,
        queries: mx.array,
        handle: PrefillHandle,
        scale: float,
        sinks: mx.array | None,
        pending: Sequence[mx.array] = (),
        copies: Copies | None = None,
    ) -> _Task:
        """Collect the pages that at least one query sees."""
        step, layer = handle.step, handle.layer
        pages = [
            _Pages(layer.pools[table.level], table.host_slots, table.starts)
            for table in step.tables
        ]
        for filled, starts in zip(handle.chunk.earlier, step.earlier_starts(), strict=True):
            every, source = Slots(range(len(starts))), (filled.keys, filled.values)
            pages.append(_Pages(layer.pools[filled.level], every, starts, source))
        pages = _visible_pages(pages, handle.store.kind, step.offset)
        g = layer.geometry
        work = Work(
            g.kv_heads,
            queries.shape[1] // g.kv_heads,
            queries.shape[2],
            sum(PAGE_TOKENS * len(one.starts) for one in pages)
            + step.tail_length
            + queries.shape[2],
            g.k_dim,
            g.v_dim,
            queries.dtype.size,
            max((one.unpacking for one in pages), default=0),
            masked=handle.store.kind.bounded,
            sinks=sinks is not None,
        )
        return cls(queries, scale, sinks, handle, pages, work, pending, copies)

    @property
    def padding(self) -> int:
        """Number of padding queries, and of padding keys, that follow the chunk."""
        return self.work.queries - self.handle.step.count

    def is_fused_available(self) -> bool:
        """Return whether MLX's dense kernel can do this task without a matrix of scores."""
        sinks = None if self.sinks is None else self.sinks.dtype
        return is_fused_available(self.work, self.queries.dtype, sinks, mx.default_device().type)

    def fits_one_call(self, cut: Plan) -> bool:
        return cut.keys is None and cut.heads == self.work.kv_heads

    def make_room(self, cut: Plan, *lazy: mx.array) -> None:
        """Evaluate ``lazy`` and `pending` if another part of the work would exceed the scratch."""
        if self.handle.store.scratch.add(cut.nbytes):
            mx.eval(*lazy, *self.pending)
            self.handle.store.scratch.add(cut.nbytes)

    def query_heads(self, heads: slice) -> slice:
        return slice(heads.start * self.work.repeats, heads.stop * self.work.repeats)


@lru_cache(maxsize=4096)
def is_fused_available(
    work: Work, dtype: mx.Dtype, sinks: mx.Dtype | None, _: mx.DeviceType
) -> bool:
    """Return whether the dense kernel of this device can do such work in one call.

    Cached: to ask builds six operations, and a pass asks for each chunk in each layer.
    """
    q_heads = work.kv_heads * work.repeats
    keys, values = (
        mx.zeros((1, work.kv_heads, work.keys, dim), dtype) for dim in (work.k_dim, work.v_dim)
    )
    try:  # raises when the graph is built; nothing is evaluated
        mx.fast.scaled_dot_product_attention(
            mx.zeros((1, q_heads, work.queries, work.k_dim), dtype),
            keys,
            values,
            scale=1.0,
            mask=mx.zeros((work.queries, work.keys), mx.bool_) if work.masked else "causal",
            sinks=None if sinks is None else mx.zeros((q_heads,), sinks),
            force_fused=True,
        )
    except ValueError:
        return False
    return True


def _visible_pages(pages: list[_Pages], kind: Kind, first: int) -> list[_Pages]:
    """Return the pages that a query at position ``first`` or later sees."""
    if not kind.bounded:
        return pages
    low = kind.low(first)
    found = []
    for level in pages:
        visible = [start + PAGE_TOKENS > low or start < kind.keep for start in level.starts]
        if any(visible):
            found.append(level.some([index for index, seen in enumerate(visible) if seen]))
    return found


def _dense(task: _Task, heads: slice) -> mx.array:
    """Attend the queries of some KV heads to all keys at once; lazy."""
    newest, heads_queries = task.handle.chunk, task.query_heads(heads)
    if heads == slice(0, task.work.kv_heads):
        parts = [pages.read_all(task.copies) for pages in task.pages]
    else:
        parts = [pages.read(heads) for pages in task.pages]
    sides = []
    for side, dense in enumerate((newest.keys[heads], newest.values[heads])):
        paged = [part[side].swapaxes(0, 1).flatten(1, 2) for part in parts]
        sides.append(mx.concatenate([*paged, dense, *_padding(task, dense)], axis=1))
    keys, values = sides
    sinks = None if task.sinks is None else task.sinks[heads_queries]
    return _attended(task, task.queries[:, heads_queries], keys[None], values[None], sinks)


def _attended(
    task: _Task, queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None
) -> mx.array:
    output: mx.array = mx.fast.scaled_dot_product_attention(
        queries,
        keys,
        values,
        scale=task.scale,
        mask=_mask(task),
        sinks=sinks,
        force_fused=task.work.fused,
    )
    return output


def _padding(task: _Task, dense: mx.array) -> list[mx.array]:
    """Return the padding after all keys or values, which no query of the chunk sees."""
    heads, _, dim = dense.shape
    return [mx.zeros((heads, task.padding, dim), dense.dtype)] if task.padding else []


def _mask(task: _Task) -> mx.array | str:
    step, kind = task.handle.step, task.handle.store.kind
    if not kind.bounded:
        return "causal"
    starts = [start for pages in task.pages for start in pages.starts]
    paged = (mx.array(starts, mx.int32)[:, None] + mx.arange(PAGE_TOKENS)).flatten()
    end = step.offset + task.work.queries
    places = mx.concatenate([paged, mx.arange(step.tail_start, end)])
    return kind.visible(mx.arange(step.offset, end)[:, None], places)


def _in_parts(task: _Task, cut: Plan) -> mx.array:
    """Attend with some KV heads at a time, or with some queries of one KV head at a time.

    Parts are evaluated when the scratch is full; the last ones stay lazy.
    """
    work = task.work
    output = mx.zeros((1, task.queries.shape[1], work.queries, work.v_dim), task.queries.dtype)
    lazy = [task.queries, task.handle.chunk.keys, task.handle.chunk.values]
    for head in range(0, work.kv_heads, cut.heads):
        heads = slice(head, min(head + cut.heads, work.kv_heads))
        heads_queries = task.query_heads(heads)
        if cut.keys is None:
            task.make_room(cut, output, *lazy)
            output[:, heads_queries] = _dense(task, heads)  # in place: no other reference exists
            continue
        for first in range(0, work.queries, cut.queries):
            some = slice(first, min(first + cut.queries, work.queries))
            softmax = OnlineSoftmax(
                task.queries[0, heads_queries, some],
                task.scale,
                work.v_dim,
                None if task.sinks is None else task.sinks[heads_queries],
            )
            for tile in _tiles(task, head, some, cut.keys):
                task.make_room(cut, output, *lazy, *softmax.state())
                softmax.add(*tile)
            output[0, heads_queries, some] = softmax.result()
    return output


def _tiles(task: _Task, head: int, some: slice, size: int) -> Iterator[Tile]:
    """Yield what some queries attend to in one head, at most ``size`` keys at a time."""
    step, kind = task.handle.step, task.handle.store.kind
    queries = range(step.offset + some.start, step.offset + some.stop)
    visible = _visible_pages(task.pages, kind, queries[0])
    for _, level in groupby(visible, key=lambda pages: id(pages.pool)):
        for tile in _cut(list(level), size // PAGE_TOKENS):
            keys, values = (
                mx.concatenate(list(side))
                for side in zip(*(some.read(slice(head, head + 1)) for some in tile), strict=True)
            )
            places = [range(one, one + PAGE_TOKENS) for some in tile for one in some.starts]
            yield (
                keys[:, 0].transpose(2, 0, 1).flatten(1),
                values[:, 0].flatten(0, 1),
                _visible(kind, queries, places),
            )
    keys, values = task.handle.chunk.keys[head], task.handle.chunk.values[head]
    for start in range(step.tail_start, queries[-1] + 1, size):
        place = range(start, min(start + size, queries[-1] + 1))
        chunk_slice = slice(place[0] - step.tail_start, place[-1] + 1 - step.tail_start)
        yield keys[chunk_slice].T, values[chunk_slice], _visible(kind, queries, [place])


def _cut(level: list[_Pages], at_once: int) -> Iterator[list[_Pages]]:
    """Yield the pages of one level, ``at_once`` at a time, whatever their sources are."""
    every = [
        (number, index) for number, one in enumerate(level) for index in range(len(one.starts))
    ]
    for at in range(0, len(every), at_once):
        tile = groupby(every[at : at + at_once], key=itemgetter(0))
        yield [level[number].some([index for _, index in some]) for number, some in tile]


def _visible(kind: Kind, queries: range, keys: list[range]) -> mx.array | None:
    """Return which keys each query sees, by positions, as ``[queries, keys]``; None: all."""
    low = kind.low(queries[-1])
    if all(one[-1] <= queries[0] and (one[0] >= low or one[-1] < kind.keep) for one in keys):
        return None
    places = mx.concatenate([mx.arange(one.start, one.stop) for one in keys])
    return kind.visible(mx.arange(queries.start, queries.stop)[:, None], places)
