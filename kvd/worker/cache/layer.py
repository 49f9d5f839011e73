"""One layer's part of the cache: pools by level, dense tails, and what awaits the flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.cache.packed import Packed, take
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import TAIL_TOKENS
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.steps import DecodeStep, PrefillStep

Sides = tuple[Packed, Packed]
"""Keys and values."""


@dataclass(frozen=True)
class Pending:
    """Packed pages of one level, of a prompt's chunk, that await the flush."""

    level: int
    keys: Packed
    values: Packed


@dataclass(frozen=True)
class Placement:
    """Where a flush puts pages of one level: pending ones, then those that it takes from tails."""

    level: int
    slots: list[int]
    kept: list[int]
    """Which of the pending ones are still wanted."""
    tails: list[int]
    """Slots of tails whose first 64 tokens are a page."""


@dataclass(frozen=True)
class Chunk:
    """A prefilled chunk's dense keys and values, behind those of the tail before it."""

    keys: mx.array
    """``[heads, tail + count, dim]``."""
    values: mx.array


@dataclass
class Writing:
    """What a flush is about to write into one layer."""

    pages: list[tuple[int, list[int], Packed, Packed]] = field(default_factory=list)
    """Level, slots, keys and values."""
    tails: list[tuple[int, Chunk]] = field(default_factory=list)
    """Slot, and its whole tail."""

    def arrays(self) -> list[mx.array]:
        """Return all that is lazy."""
        packed = [array for _, _, *sides in self.pages for side in sides for array in side]
        return [*packed, *(array for _, one in self.tails for array in (one.keys, one.values))]


class LayerStore:
    """Pools, tails and pending pages of one layer."""

    def __init__(self, geometry: LayerGeometry, schemes: list[Scheme], dtype: mx.Dtype) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.pools = [PagePool(geometry, scheme, dtype) for scheme in schemes]
        self.tail_keys = mx.zeros((0, geometry.kv_heads, TAIL_TOKENS, geometry.k_dim), dtype)
        self.tail_values = mx.zeros((0, geometry.kv_heads, TAIL_TOKENS, geometry.v_dim), dtype)
        self.pending: list[Pending] = []
        """In the order of the store's own list of their rows."""
        self.new_tails: list[tuple[int, Chunk]] = []
        """What prefill left over for a tail's slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of pools and tails."""
        return sum(pool.nbytes for pool in self.pools) + self.tail_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails."""
        return self.tail_keys.shape[0] * self.geometry.dense_bytes(TAIL_TOKENS)

    def arrays(self) -> list[mx.array]:
        """All arrays that stay: what `nbytes` counts."""
        pools = [array for pool in self.pools for array in pool.arrays()]
        return [self.tail_keys, self.tail_values, *pools]

    def lazy_arrays(self) -> list[mx.array]:
        """Return what steps leave to be evaluated: tails, and what chunks leave for the flush."""
        pending = [array for one in self.pending for array in (*one.keys, *one.values)]
        new = [array for _, chunk in self.new_tails for array in (chunk.keys, chunk.values)]
        return [self.tail_keys, self.tail_values, *pending, *new]

    # A decode step: lazy. The tails are small enough to be copied where MLX has to.

    def append(self, step: DecodeStep, keys: mx.array, values: mx.array) -> None:
        """Write one token for each row, ``[rows or more, heads, 1, dim]``."""
        if step.backend is not None:
            step.backend.append(self, step, keys, values)
        else:
            self.append_plainly(step, keys, values)

    def append_plainly(self, step: DecodeStep, keys: mx.array, values: mx.array) -> None:
        """Do so with plain operations."""
        which = slice(len(step.rows)) if step.givers is None else step.givers
        # One fused operation; a scatter is a copy, the indices, and the scatter.
        self.tail_keys = mx.where(step.taken(), keys[which], self.tail_keys)
        self.tail_values = mx.where(step.taken(), values[which], self.tail_values)

    def move_up(self, slots: mx.array) -> None:
        """Let what is behind the first 64 tokens of these tails take their place; lazy."""
        where = (slots, slice(None), slice(PAGE_TOKENS))
        _put(self.tail_keys, where, self.tail_keys[slots, :, PAGE_TOKENS:])
        _put(self.tail_values, where, self.tail_values[slots, :, PAGE_TOKENS:])

    def tails(self, step: DecodeStep) -> tuple[mx.array, mx.array]:
        """Return the rows' tails, ``[rows, heads, TAIL_TOKENS, dim]``."""
        if step.whole:
            return self.tail_keys, self.tail_values
        return self.tail_keys[step.slots], self.tail_values[step.slots]

    # A prefill step.

    def extend(self, step: PrefillStep, keys: mx.array, values: mx.array) -> Chunk:
        """Take a chunk's keys and values, ``[1, heads, count, dim]``; lazy.

        Full pages and the new tail await the flush. Returns what the chunk's queries attend to
        beside the row's pages.
        """
        chunk = Chunk(keys[0], values[0])
        slot, before = step.row.slot, step.tail_length
        if before:
            chunk = Chunk(
                mx.concatenate([self.tail_keys[slot, :, :before], keys[0]], axis=1),
                mx.concatenate([self.tail_values[slot, :, :before], values[0]], axis=1),
            )
        full = step.new_pages * PAGE_TOKENS
        if full:
            level = step.row.level
            packed = self.pools[level].pack(_paged(chunk.keys, full), _paged(chunk.values, full))
            self.pending.append(Pending(level, *packed))
        self.new_tails.append((slot, Chunk(chunk.keys[:, full:], chunk.values[:, full:])))
        return chunk

    # The flush: the device is idle.

    def gather_pages(self, placements: list[Placement]) -> Writing:
        """Take the pages that a flush writes; lazy, for `put`."""
        pending, self.pending = self.pending, []
        writing = Writing()
        for place in placements:
            parts = []
            if place.kept:
                mine = [(one.keys, one.values) for one in pending if one.level == place.level]
                parts.append(_kept(_joined(mine), place.kept))
            if place.tails:
                parts.append(self._pack_tails(place))
            writing.pages.append((place.level, place.slots, *_joined(parts)))
        return writing

    def _pack_tails(self, place: Placement) -> Sides:
        which = mx.array(place.tails)
        heads = (side[which, :, :PAGE_TOKENS] for side in (self.tail_keys, self.tail_values))
        return self.pools[place.level].pack(*heads)

    def gather_tails(self) -> Writing:
        """Take what tails are to hold behind a chunk; lazy, for `put`."""
        new_tails, self.new_tails = self.new_tails, []
        return Writing(tails=[(slot, chunk) for slot, chunk in new_tails if chunk.keys.shape[1]])

    def put(self, writing: Writing) -> None:
        """Write what was gathered and evaluated; lazy, in place once `written` is evaluated."""
        for level, slots, keys, values in writing.pages:
            self.pools[level].write(mx.array(slots), keys, values)
        for slot, chunk in writing.tails:
            tokens = chunk.keys.shape[1]
            self.tail_keys[slot, :, :tokens] = chunk.keys
            self.tail_values[slot, :, :tokens] = chunk.values

    def written(self, writing: Writing) -> list[mx.array]:
        """Return what `put` has written."""
        arrays = [array for level, *_ in writing.pages for array in self.pools[level].arrays()]
        return [*arrays, self.tail_keys, self.tail_values] if writing.tails else arrays

    def write(self, level: int, slots: list[int], keys: Packed, values: Packed) -> None:
        """Store packed pages in a level's pool; evaluates. The device must be idle."""
        # Evaluated first, so that nothing but the write holds the pool.
        mx.eval(keys, values)
        pool = self.pools[level]
        pool.write(mx.array(slots), keys, values)
        mx.eval(pool.arrays())

    def move(self, source: int, target: int, old: list[int], new: list[int]) -> None:
        """Bring pages to another level, or to other slots of the same one; evaluates."""
        self.write(target, new, *self.pools[source].converted(mx.array(old), self.pools[target]))

    def refill_tail(self, slot: int, page: PageId, tokens: int) -> None:
        """Put a page's first tokens, dequantized, where the tail begins; evaluates."""
        keys, values = self.pools[page.level].read(mx.array([page.slot]))
        self.fill_tail(slot, keys[0, :, :tokens], values[0, :, :tokens])

    def copy_tail(self, slot: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Return copies of a tail's first tokens, ``[heads, tokens, dim]`` of both; lazy."""
        # A slice would keep the tails of all rows alive.
        first = mx.arange(tokens)
        return mx.take(self.tail_keys[slot], first, 1), mx.take(self.tail_values[slot], first, 1)

    def fill_tail(self, slot: int, keys: mx.array, values: mx.array) -> None:
        """Put tokens, ``[heads, tokens, dim]``, where a tail begins; evaluates."""
        tokens = keys.shape[1]
        mx.eval(keys, values)
        self.tail_keys[slot, :, :tokens] = keys
        self.tail_values[slot, :, :tokens] = values
        mx.eval(self.tail_keys, self.tail_values)

    def move_tail(self, old: int, new: int) -> None:
        """Copy a whole tail to another slot; evaluates."""
        self.fill_tail(new, self.tail_keys[old], self.tail_values[old])

    def cut_tails(self, count: int) -> None:
        """Keep the first so many tails; evaluates."""
        # A slice would keep the whole buffer alive.
        self.tail_keys = mx.contiguous(self.tail_keys[:count])
        mx.eval(self.tail_keys)
        self.tail_values = mx.contiguous(self.tail_values[:count])
        mx.eval(self.tail_values)

    def add_tail(self) -> None:
        """Add room for one more row; evaluates."""
        self.tail_keys = _grown(self.tail_keys)
        self.tail_values = _grown(self.tail_values)

    def clear_tail(self, slot: int) -> None:
        """Make a tail's values zero; lazy."""
        self.tail_values[slot] = mx.zeros(self.tail_values.shape[1:], self.dtype)

    def drop_tails(self) -> None:
        """Forget all tails, and what awaits the flush."""
        self.pending, self.new_tails = [], []
        self.tail_keys = mx.zeros((0, *self.tail_keys.shape[1:]), self.dtype)
        self.tail_values = mx.zeros((0, *self.tail_values.shape[1:]), self.dtype)


def _put(tails: mx.array, where: tuple[mx.array | slice, ...], new: mx.array) -> None:
    if new.size:  # a scatter into nothing ends the process (mlx 0.32.4, CPU)
        tails[where] = new


def _paged(dense: mx.array, tokens: int) -> mx.array:
    heads, _, dim = dense.shape
    pages = tokens // PAGE_TOKENS
    return dense[:, :tokens].reshape(heads, pages, PAGE_TOKENS, dim).swapaxes(0, 1)


def _kept(sides: Sides, which: list[int]) -> Sides:
    keys, values = sides
    if len(which) == keys[0].shape[0]:
        return sides
    return take(keys, mx.array(which)), take(values, mx.array(which))


def _joined(parts: Sequence[Sides]) -> Sides:
    """Return pages, then others."""
    if len(parts) == 1:
        return parts[0]
    keys, values = (
        tuple(mx.concatenate(list(arrays)) for arrays in zip(*sides, strict=True))
        for sides in zip(*parts, strict=True)
    )
    return keys, values


def _grown(tails: mx.array) -> mx.array:
    tails = mx.concatenate([tails, mx.zeros((1, *tails.shape[1:]), tails.dtype)])
    mx.eval(tails)
    return tails
