"""One layer's part of the cache: pools by level, dense tails, and what waits for the flush."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import mlx.core as mx

from kvd.worker.cache.host_copy import Record, copy_pages
from kvd.worker.cache.packed import Packed, joined, take
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.together import Replacement
from protocol.pages import TAIL_TOKENS

Sides = tuple[Packed, Packed]


@dataclass(frozen=True)
class PendingPages:
    """Packed pages of one level, from a chunk of a prompt, that the next flush writes."""

    level: int
    keys: Packed
    values: Packed


@dataclass(frozen=True)
class Placement:
    """Where a flush writes pages of one level: first pending pages, then pages from tails."""

    level: int
    slots: list[int]
    kept: list[int]
    """Indices of the pending pages whose rows still exist."""
    tails: list[int]
    """Slots of tails whose first 64 tokens become a page."""


@dataclass(frozen=True)
class Chunk:
    """Dense keys and values of a prefilled chunk, preceded by those of the row's tail."""

    keys: mx.array
    """``[heads, tail + count, dim]``."""
    values: mx.array
    earlier: tuple[PendingPages, ...] = ()
    """Pages that each earlier chunk of this row in the same pass has filled."""


@dataclass
class FlushWrites:
    """What a flush writes into one layer."""

    pages: list[tuple[int, list[int], Packed, Packed]] = field(default_factory=list)
    """Level, slots, keys and values."""
    tails: list[tuple[int, Chunk]] = field(default_factory=list)

    def arrays(self) -> list[mx.array]:
        packed = [array for _, _, *sides in self.pages for side in sides for array in side]
        return [*packed, *(array for _, tail in self.tails for array in (tail.keys, tail.values))]


class LayerStore:
    """Pools, tails and pending pages of one layer."""

    def __init__(self, geometry: LayerGeometry, schemes: list[Scheme], dtype: mx.Dtype) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.pools = [PagePool(geometry, scheme, dtype) for scheme in schemes]
        self.tail_keys = mx.zeros((0, geometry.kv_heads, TAIL_TOKENS, geometry.k_dim), dtype)
        self.tail_values = mx.zeros((0, geometry.kv_heads, TAIL_TOKENS, geometry.v_dim), dtype)
        self.pending: list[PendingPages] = []
        """In the order in which the flush lists the pages' rows."""
        self._unpacked: list[tuple[int, mx.array, mx.array]] = []
        """Level, dense keys and values of the pages of a pass's chunks that follow `pending`."""
        self.new_tails: list[tuple[int, Chunk]] = []

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools) + self.tail_bytes

    @property
    def tail_bytes(self) -> int:
        return self.tail_keys.shape[0] * self.geometry.dense_bytes(TAIL_TOKENS)

    def arrays(self) -> list[mx.array]:
        pools = [array for pool in self.pools for array in pool.arrays()]
        return [self.tail_keys, self.tail_values, *pools]

    def lazy_arrays(self) -> list[mx.array]:
        """Return the arrays that steps leave unevaluated: tails, pending pages and new tails."""
        return [self.tail_keys, self.tail_values, *self.unfinished]

    # Decode steps. Tails are small enough that MLX may copy them.

    def put_tokens(self, places: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write one token per tail, ``[tails, heads, 1, dim]``, where ``places`` is True; lazy."""
        # One fused operation. A scatter would copy the tails, build indices, and then scatter.
        self.tail_keys = mx.where(places, keys, self.tail_keys)
        self.tail_values = mx.where(places, values, self.tail_values)

    def remove_committed(self, slots: mx.array) -> None:
        """In each of these tails, move the tokens after the first 64 to the front; lazy."""
        first = (slots, slice(None), slice(PAGE_TOKENS))
        _put(self.tail_keys, first, self.tail_keys[slots, :, PAGE_TOKENS:])
        _put(self.tail_values, first, self.tail_values[slots, :, PAGE_TOKENS:])

    # Prefill steps.

    def put_chunk(
        self,
        slot: int,
        tail_length: int,
        level: int,
        new_pages: int,
        keys: mx.array,
        values: mx.array,
        *,
        continues: bool = False,
        continued: bool = False,
        last: bool = True,
    ) -> Chunk:
        """Take a chunk's keys and values, ``[1, heads, count, dim]``; lazy.

        New pages and the new tail wait for the flush. Returns the chunk, preceded by the old tail.
        ``continues``: the previous call was for the same row and pass, and left that tail.
        ``continued``: the next call is for the same row and pass. ``last``: no call for this pass
        follows. Pages of several rows are then packed together.
        """
        tail: Chunk | None = None
        if continues:
            _, tail = self.new_tails.pop()
        elif tail_length:
            first = slot, slice(None), slice(tail_length)
            tail = Chunk(self.tail_keys[first], self.tail_values[first])
        # Not `keys[0]`: with an int as the only index, MLX gathers, which copies.
        keys, values = keys.squeeze(0), values.squeeze(0)
        chunk = Chunk(keys, values)
        if tail is not None:
            chunk = Chunk(
                mx.concatenate([tail.keys, keys], axis=1),
                mx.concatenate([tail.values, values], axis=1),
                tail.earlier,
            )
        full = new_pages * PAGE_TOKENS
        earlier = chunk.earlier
        if full:
            if continued:  # what is packed below is one pending entry
                self._pack()
            paged_keys, paged_values = (_paged(side, full) for side in (chunk.keys, chunk.values))
            self._unpacked.append((level, paged_keys, paged_values))
            if continued:  # the next chunk sees these pages as they will be stored
                self._pack()
                earlier = (*earlier, self.pending[-1])
        if last:
            self._pack()
        keys, values = (side[:, full:] for side in (chunk.keys, chunk.values))
        if not continued:  # slices would keep the whole pass alive until the flush
            keys, values = mx.contiguous(keys), mx.contiguous(values)
        self.new_tails.append((slot, Chunk(keys, values, earlier)))
        return chunk

    def _pack(self) -> None:
        """Quantize the pages that are not packed yet, those of a level together; lazy.

        Dtypes are kept apart: values may have another one than the tail before them, and joined
        pages would be quantized from the wider one, so that scales depended on the other rows.
        """
        unpacked, self._unpacked = self._unpacked, []
        for (level, *_), group in groupby(unpacked, key=_level_and_dtypes):
            _, *sides = zip(*group, strict=True)
            keys, values = (joined(list(side)) for side in sides)
            self.pending.append(PendingPages(level, *self.pools[level].pack(keys, values)))

    @property
    def unfinished(self) -> list[mx.array]:
        """What a prefill pass leaves unevaluated: pages and tails that wait for the flush."""
        pending = [array for pages in self.pending for array in (*pages.keys, *pages.values)]
        return pending + [
            array for _, chunk in self.new_tails for array in (chunk.keys, chunk.values)
        ]

    def forget_chunks(self) -> None:
        """Drop what a prefill pass left."""
        self.pending, self.new_tails, self._unpacked = [], [], []

    # The flush. The device is idle.

    def gather_pages(self, placements: list[Placement]) -> FlushWrites:
        """Remove and return the pages that a flush writes; lazy, for `put`."""
        pending, self.pending = self.pending, []
        writes = FlushWrites()
        for place in placements:
            parts = []
            if place.kept:
                same_level = [
                    (pages.keys, pages.values) for pages in pending if pages.level == place.level
                ]
                parts.append(_kept(_joined(same_level), place.kept))
            if place.tails:
                parts.append(self._pack_tails(place))
            pool = self.pools[place.level]
            keys, values = map(_as_stored, _joined(parts), (pool.keys, pool.values))
            writes.pages.append((place.level, place.slots, keys, values))
        return writes

    def _pack_tails(self, place: Placement) -> Sides:
        slots = mx.array(place.tails)
        # The slice first: both at once would be a gather with three arrays of indices.
        heads = (side[:, :, :PAGE_TOKENS][slots] for side in (self.tail_keys, self.tail_values))
        return self.pools[place.level].pack(*heads)

    def gather_tails(self) -> FlushWrites:
        new_tails, self.new_tails = self.new_tails, []
        return FlushWrites(tails=[(slot, tail) for slot, tail in new_tails if tail.keys.shape[1]])

    def put(self, writes: FlushWrites) -> None:
        """Write what was gathered and evaluated; lazy. Evaluate `written` to write in place."""
        in_place = mx.default_device().type == mx.DeviceType.cpu
        for level, slots, keys, values in writes.pages:
            pool = self.pools[level]
            (pool.write_in_place if in_place else pool.write)(slots, keys, values)
        for slot, tail in writes.tails:
            tokens = tail.keys.shape[1]
            self.tail_keys[slot, :, :tokens] = tail.keys
            self.tail_values[slot, :, :tokens] = tail.values

    def written(self, writes: FlushWrites) -> list[mx.array]:
        arrays = [array for level, *_ in writes.pages for array in self.pools[level].arrays()]
        return [*arrays, self.tail_keys, self.tail_values] if writes.tails else arrays

    def write(self, level: int, slots: list[int], keys: Packed, values: Packed) -> None:
        """Store packed pages in a level's pool; evaluates. The device must be idle."""
        # Evaluated first, so that nothing except the write references the pool.
        mx.eval(keys, values)
        pool = self.pools[level]
        pool.write(slots, keys, values)
        mx.eval(pool.arrays())

    def write_record(
        self, level: int, slots: Sequence[int | None], record: Record
    ) -> Callable[[], None] | None:
        """Copy a record of packed pages to ``slots`` of a level's pool; None: it is not needed.

        The device must be idle if `host_copy.needs_idle_device`. Returns and raises what
        `host_copy.copy_pages` does.
        """
        return copy_pages(self.pools[level].arrays(), slots, record)

    def move(self, source: int, target: int, old: list[int], new: list[int]) -> None:
        """Convert pages to another level, or move them to other slots of their level; evaluates."""
        self.write(target, new, *self.pools[source].converted(mx.array(old), self.pools[target]))

    # Single tails.

    def refill_tail(self, slot: int, page: PageId, tokens: int) -> None:
        """Put a page's first tokens, dequantized, at the front of a tail; evaluates."""
        keys, values = self.pools[page.level].read(mx.array([page.slot]))
        self.fill_tail(slot, keys[0, :, :tokens], values[0, :, :tokens])

    def copy_tail(self, slot: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Return copies of a tail's first keys and values, ``[heads, tokens, dim]``; lazy."""
        # Slices would keep the tails of all rows alive.
        first = mx.arange(tokens)
        keys, values = self.tail_keys[slot, :], self.tail_values[slot, :]
        return mx.take(keys, first, 1), mx.take(values, first, 1)

    def no_tail(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of an empty tail, ``[heads, 0, dim]``."""
        shape, g = (self.geometry.kv_heads, 0), self.geometry
        return mx.zeros((*shape, g.k_dim), self.dtype), mx.zeros((*shape, g.v_dim), self.dtype)

    def fill_tail(self, slot: int, keys: mx.array, values: mx.array) -> None:
        """Put tokens, ``[heads, tokens, dim]``, at the front of a tail; evaluates."""
        fill_tails([self], slot, [(keys, values)])

    def move_tail(self, old: int, new: int) -> None:
        """Copy a whole tail to another slot; evaluates."""
        # Copies: with a slice, writing would copy the tails of all rows.
        self.fill_tail(new, *self.copy_tail(old, TAIL_TOKENS))

    def resized_tails(self, count: int) -> Iterator[Replacement]:
        """Yield copies of the keys' and of the values' tails: the first ``count``, or more."""
        for name in ("tail_keys", "tail_values"):
            tails: mx.array = getattr(self, name)
            more = count - tails.shape[0]
            if more > 0:
                empty = mx.zeros((more, *tails.shape[1:]), tails.dtype)
                new = mx.concatenate([tails, empty])
            else:  # a slice would keep the whole buffer alive
                new = mx.contiguous(tails[:count])
            yield [new], partial(setattr, self, name, new)

    def clear_tail(self, slot: int) -> None:
        """Set a tail's values to zero; lazy."""
        self.tail_values[slot] = mx.zeros(self.tail_values.shape[1:], self.dtype)

    def drop_tails(self) -> None:
        """Free all tails, and whatever waits for the flush."""
        self.forget_chunks()
        self.tail_keys = mx.zeros((0, *self.tail_keys.shape[1:]), self.dtype)
        self.tail_values = mx.zeros((0, *self.tail_values.shape[1:]), self.dtype)


def fill_tails(
    layers: Sequence[LayerStore], slot: int, tails: Sequence[tuple[mx.array, mx.array]]
) -> None:
    """Put tokens, ``[heads, tokens, dim]``, at the front of each layer's tail; evaluates once.

    ``tails``: keys and values for each layer. The device must be idle, or the tails of all rows are
    copied.
    """
    mx.eval(tails)  # first, so that nothing except the write references the layers' tails
    for layer, (keys, values) in zip(layers, tails, strict=True):
        tokens = keys.shape[1]
        layer.tail_keys[slot, :, :tokens] = keys
        layer.tail_values[slot, :, :tokens] = values
    mx.eval([array for layer in layers for array in (layer.tail_keys, layer.tail_values)])


def _put(tails: mx.array, where: tuple[mx.array | slice, ...], new: mx.array) -> None:
    if new.size:  # a scatter of nothing ends the process (mlx 0.32.4, CPU)
        tails[where] = new


def _level_and_dtypes(pages: tuple[int, mx.array, mx.array]) -> tuple[int, mx.Dtype, mx.Dtype]:
    level, keys, values = pages
    return level, keys.dtype, values.dtype


def _paged(dense: mx.array, tokens: int) -> mx.array:
    return mx.unflatten(dense[:, :tokens], 1, (-1, PAGE_TOKENS)).swapaxes(0, 1)


def _as_stored(side: Packed, stored: Packed) -> Packed:
    """Return a side in the pool's dtypes, contiguous: dense keys are transposed.

    A model's values can have another dtype than its keys, whose dtype the pools have.
    """
    return tuple(
        mx.contiguous(array.astype(like.dtype)) for array, like in zip(side, stored, strict=True)
    )


def _kept(sides: Sides, indices: list[int]) -> Sides:
    keys, values = sides
    if len(indices) == keys[0].shape[0]:
        return sides
    return take(keys, mx.array(indices)), take(values, mx.array(indices))


def _joined(parts: Sequence[Sides]) -> Sides:
    if len(parts) == 1:
        return parts[0]
    keys, values = (
        tuple(mx.concatenate(list(arrays)) for arrays in zip(*sides, strict=True))
        for sides in zip(*parts, strict=True)
    )
    return keys, values
