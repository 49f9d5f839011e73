"""One layer's part of the cache: pools by level, dense tails, and what waits for the flush."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, Protocol

import mlx.core as mx

from kvd.worker.cache.host_copy import Record, copy_pages
from kvd.worker.cache.packed import Packed, Slots, joined, runs_of, take
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pass_places import PassPlaces
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.together import Replacement
from protocol.pages import TAIL_TOKENS

Sides = tuple[Packed, Packed]
PackTails = Callable[["LayerStore", int, Sequence[int]], Sides | None]
"""Packs the first 64 tokens of tails, given by slot, as pages of a level. Returns None to leave
that to plain operations."""


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

    source: tuple[mx.array, mx.array]
    """Keys and values, ``[places, heads, dim]``."""
    tokens: tuple[slice, ...] = (slice(None),)
    """The chunk's places."""
    earlier: tuple[PendingPages, ...] = ()
    """Pages that each earlier chunk of this row in the same pass has filled."""

    @cached_property
    def keys(self) -> mx.array:
        """``[heads, tail + count, dim]``, lazy."""
        return self._side(0)

    @cached_property
    def values(self) -> mx.array:
        return self._side(1)

    def _side(self, side: int) -> mx.array:
        return joined([self.source[side][some] for some in self.tokens]).swapaxes(0, 1)


class NewTails(Protocol):
    """Tails that a pass leaves in one layer."""

    in_place: ClassVar[bool]
    """Whether `put` writes in place if the device is idle."""

    @property
    def keys(self) -> mx.array: ...

    @property
    def values(self) -> mx.array: ...

    def put(self, layer: LayerStore) -> None:
        """Write them to the front of their rows' tails, or keep them for snapshots; lazy."""


@dataclass(frozen=True)
class EqualTails:
    """Tails of the same length."""

    in_place: ClassVar[bool] = True

    slots: tuple[int, ...]
    keys: mx.array
    """``[rows, tokens, heads, dim]``."""
    values: mx.array

    def put(self, layer: LayerStore) -> None:
        for tails, side in ((layer.tail_keys, self.keys), (layer.tail_values, self.values)):
            at = 0
            for run in runs_of(self.slots):
                some = side[at : at + run.stop - run.start].swapaxes(1, 2)
                # Fewer than `TAIL_TOKENS`: arrays written as a whole get the source's strides.
                tails[run, :, : some.shape[2]] = some
                at += len(some)


@dataclass(frozen=True)
class KeptTails:
    """Tails that rows had inside a pass, at the ends of chunks, for snapshots."""

    in_place: ClassVar[bool] = True

    keys: mx.array
    """``[tokens, heads, dim]``."""
    values: mx.array
    spans: tuple[slice, ...]
    """One slice of these arrays for each tail."""

    def put(self, layer: LayerStore) -> None:
        layer.kept = self

    def copy(self, number: int) -> tuple[mx.array, mx.array]:
        """Return copies of a tail's keys and values, ``[heads, tokens, dim]``; lazy."""
        sides = (side[self.spans[number]] for side in (self.keys, self.values))
        keys, values = (mx.contiguous(side.swapaxes(0, 1)) for side in sides)
        return keys, values


@dataclass
class FlushWrites:
    """What a flush writes into one layer."""

    pages: list[tuple[int, Sequence[int | None], Packed, Packed]] = field(default_factory=list)
    """Level, slots, keys and values. With a kernel (`device_pages`), a slot may be None: its page
    is left out."""
    tails: list[NewTails] = field(default_factory=list)
    created_bytes: int = 0
    """Bytes that the write takes until its end."""

    def arrays(self) -> list[mx.array]:
        packed = [array for _, _, *sides in self.pages for side in sides for array in side]
        return [*packed, *(array for new in self.tails for array in (new.keys, new.values))]


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
        self.new_tails: list[NewTails] = []
        self.kept: KeptTails | None = None
        """Tails at chunk ends inside the last pass, until the next one begins."""

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

    def put_chunks(self, places: PassPlaces, keys: mx.array, values: mx.array) -> list[Chunk]:
        """Take the keys and values of a pass's tokens, ``[tokens, heads, dim]``; lazy.

        New pages and new tails wait for the flush. Returns the chunks, preceded by their tails.
        """
        source = self._after_tails(places, keys, values)
        for filled in places.pages:
            sides = (_paged(side) for side in take(source, filled.tokens))
            packed = self.pools[filled.level].pack(*sides)
            self.pending.append(PendingPages(filled.level, *packed))
        for new in places.new_tails:
            tails = (_copied(side, new.tokens) for side in source)
            rows = (len(new.slots), -1)
            found = EqualTails(new.slots, *(mx.unflatten(tail, 0, rows) for tail in tails))
            self.new_tails.append(found)
        if places.kept is not None:
            kept_keys, kept_values = (_copied(side, places.kept.tokens) for side in source)
            self.new_tails.append(KeptTails(kept_keys, kept_values, places.kept.spans))
        filled_pages = self.pending[len(self.pending) - len(places.pages) :]
        return [
            Chunk(source, chunk.tokens, tuple(filled_pages[group] for group in chunk.earlier))
            for chunk in places.chunks
        ]

    def _after_tails(
        self, places: PassPlaces, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the source of a pass: its tokens, preceded by the tails of its rows."""
        # Always as wide as tails. Otherwise the bits of a row's pages would depend on other rows.
        keys, values = (
            side.astype(mx.result_type(side, self.tail_keys)) for side in (keys, values)
        )
        if not places.tails.runs:
            return keys, values
        # The slice first: both at once would be a gather with three arrays of indices.
        tails = (side[:, :, : places.tail_width] for side in (self.tail_keys, self.tail_values))
        old = (side.swapaxes(1, 2).flatten(0, 1) for side in take(tuple(tails), places.tails))
        tail_keys, tail_values = old
        return mx.concatenate([tail_keys, keys]), mx.concatenate([tail_values, values])

    @property
    def unfinished(self) -> list[mx.array]:
        """What a prefill pass leaves unevaluated: pages and tails that wait for the flush."""
        pending = [array for pages in self.pending for array in (*pages.keys, *pages.values)]
        return pending + [array for new in self.new_tails for array in (new.keys, new.values)]

    def forget_chunks(self) -> None:
        """Drop what a prefill pass left."""
        self.pending, self.new_tails = [], []

    # The flush. The device is idle, unless `is_flushed_by_kernel`.

    @property
    def is_flushed_by_kernel(self) -> bool:
        """Whether kernels write all that waits for a flush."""
        in_place = any(new.in_place for new in self.new_tails)
        return not in_place and all(pool.is_written_by_kernel for pool in self.pools)

    def gather(self, placements: list[Placement], pack_tails: PackTails) -> FlushWrites:
        """Remove and return the pages and the new tails that a flush writes; lazy, for `put`."""
        writes, tails = self.gather_pages(placements, pack_tails), self.gather_tails()
        return FlushWrites(writes.pages, tails.tails, writes.created_bytes + tails.created_bytes)

    def gather_pages(self, placements: list[Placement], pack_tails: PackTails) -> FlushWrites:
        """Remove and return the pages that a flush writes; lazy, for `put`.

        ``pack_tails``: how a backend packs the pages of tails.
        """
        pending, self.pending = self.pending, []
        writes = FlushWrites()
        for place in placements:
            if self.pools[place.level].is_written_by_kernel:
                writes.pages += self._unjoined(place, pending)
                if place.tails:
                    packed = self._pack_tails(place, pack_tails)
                    slots = place.slots[len(place.kept) :]
                    writes.pages.append((place.level, slots, *self._stored_sides(place, packed)))
                    writes.created_bytes += sum(array.nbytes for side in packed for array in side)
                continue
            parts = []
            if place.kept:
                same_level = [
                    (pages.keys, pages.values) for pages in pending if pages.level == place.level
                ]
                parts.append(_kept(_joined(same_level), place.kept))
            if place.tails:
                parts.append(self._pack_tails(place, pack_tails))
            sides = self._stored_sides(place, _joined(parts))
            writes.pages.append((place.level, place.slots, *sides))
            writes.created_bytes += sum(array.nbytes for side in sides for array in side)
        return writes

    def _stored_sides(self, place: Placement, sides: Sides) -> Sides:
        pool = self.pools[place.level]
        keys, values = map(_as_stored, sides, (pool.keys, pool.values))
        return keys, values

    def _unjoined(
        self, place: Placement, pending: Sequence[PendingPages]
    ) -> Iterator[tuple[int, Sequence[int | None], Packed, Packed]]:
        """Yield the pending pages of a placement as they are: nothing is copied."""
        slots = dict(zip(place.kept, place.slots, strict=False))
        first = 0
        for pages in pending:
            if pages.level == place.level:
                keys, values = self._stored_sides(place, (pages.keys, pages.values))
                count = keys[0].shape[0]
                where = [slots.get(index) for index in range(first, first + count)]
                yield place.level, where, keys, values
                first += count

    def _pack_tails(self, place: Placement, pack_tails: PackTails) -> Sides:
        if (found := pack_tails(self, place.level, place.tails)) is not None:
            return found
        slots = mx.array(place.tails)
        # The slice first: both at once would be a gather with three arrays of indices.
        heads = (side[:, :, :PAGE_TOKENS][slots] for side in (self.tail_keys, self.tail_values))
        return self.pools[place.level].pack(*heads)

    def gather_tails(self) -> FlushWrites:
        tails, self.new_tails = self.new_tails, []
        created = sum(
            new.keys.nbytes + new.values.nbytes if new.in_place else self.tail_bytes
            for new in tails
        )
        return FlushWrites(tails=tails, created_bytes=created)

    def writes_by_kernel(self, writes: FlushWrites) -> bool:
        """Return whether `put` takes arrays that are not evaluated."""
        pools = (self.pools[level] for level, *_ in writes.pages)
        return all(pool.is_written_by_kernel for pool in pools) and all(
            not new.in_place for new in writes.tails
        )

    def put(self, writes: FlushWrites) -> list[mx.array]:
        """Write gathered pages and tails; return the arrays whose evaluation writes them.

        ``writes.arrays()`` must have been evaluated, unless `writes_by_kernel`.
        """
        written = list[mx.array]()
        for level, slots, keys, values in writes.pages:
            written += self.pools[level].store(slots, keys, values)
        for new in writes.tails:
            new.put(self)
        return [*written, self.tail_keys, self.tail_values] if writes.tails else written

    def write(self, level: int, slots: list[int], keys: Packed, values: Packed) -> None:
        """Store packed pages in a level's pool; evaluates. The device must be idle."""
        pool = self.pools[level]
        if not pool.is_written_by_kernel:
            mx.eval(keys, values)  # first, so that nothing except the write references the pool
        stored = map(_as_stored, (keys, values), (pool.keys, pool.values))
        mx.eval(pool.store(slots, *stored))

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
                new = mx.concatenate([tails, empty]) if len(tails) else empty
            else:  # a slice would keep the whole buffer alive
                new = mx.contiguous(tails[:count])
            copied_bytes = new.nbytes if len(tails) else 0
            yield Replacement([new], partial(setattr, self, name, new), copied_bytes)

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


def _paged(tokens: mx.array) -> mx.array:
    """Return tokens ``[tokens, heads, dim]`` as pages ``[pages, heads, 64, dim]``."""
    return mx.unflatten(tokens, 0, (-1, PAGE_TOKENS)).swapaxes(1, 2)


def _copied(side: mx.array, tokens: Slots) -> mx.array:
    """Return a copy of some tokens; a slice would keep the whole pass alive until the flush."""
    (found,) = take((side,), tokens)
    return mx.contiguous(found) if len(tokens.runs) == 1 else found


def _as_stored(side: Packed, stored: Packed) -> Packed:
    """Return a side in the pool's dtypes, contiguous: dense keys are transposed.

    A model's values can have another dtype than its keys, whose dtype the pools have.
    """
    if len(side) > 1 and side[1].dtype == stored[1].dtype:
        return side  # quantized pages are contiguous
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
