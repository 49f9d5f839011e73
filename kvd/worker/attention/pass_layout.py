"""Where the tokens of a packed prefill are for its kernels, computed once for all layers.

A chunk's query sees, in this order, its row's pages, the tail before the chunk, and the chunk up to
its own token. Pages are read from dense *copies*. So is the tail, unless all its tokens are in the
batch. In this drawing, pages have 4 tokens. Before the pass, row 1 has one page and a tail of 3
tokens. It has two chunks in the pass ::

    batch    u v w x y z A A A A b b b .     u to z, A: chunks of row 1; b: one of row 2; .: padding
    copies   p p p p | q q q u | q q q       p: the page; q: the tail; q q q u: the page that the
                                             first chunk fills

    chunk    copies of pages     copies of the tail     batch
    u to z   p p p p             q q q                  from u on
    A        p p p p q q q u                            from v on

Each layer overwrites the copies. If the copies of all rows do not fit into the scratch together,
the rows are divided into *parts*, which are processed one after another. A row is never divided.

A short chunk after many pages is divided into *splits* (`Tiling.splits`): its tiles are repeated
for each split, with a share of the pages. The last split also has the tail and the chunk. If a
chunk of a part has splits, all tokens of the part write *entries*, one per split, and one more
kernel combines them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import add

import mlx.core as mx

from kvd.worker.attention.chunk_tiles import ChunkPlaces, empty_tiles
from kvd.worker.attention.kernels.arguments import TileSplits, Tiling
from kvd.worker.attention.kernels.attend import COLUMNS, ENTRY_COLUMN
from kvd.worker.attention.kernels.decode import ROW_NUMBERS
from kvd.worker.cache.page_tables import EARLIER, PAGE_NUMBERS, page_locations, to_mlx
from kvd.worker.cache.pass_places import by_row, spans_of
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.steps import PackedPrefill, PrefillStep
from protocol.pages import TAIL_TOKENS


@dataclass(frozen=True)
class CopyPlan:
    """Which keys and values one `unpack` kernel copies, and to which index. Holds no copies."""

    levels: tuple[int, ...]
    """Precision levels of the pages. ``EARLIER + level`` stands for pages of that level that the
    pass itself fills."""
    paged: mx.array | None
    """As in `kernels.arguments.Unpack`."""
    copied: mx.array


@dataclass(frozen=True)
class Part:
    """Rows that are attended together."""

    tokens: int
    """Number of their tokens in the batch. The last part has the batch's padding, too."""
    tiles: mx.array
    splits: TileSplits | None
    """Both as in `kernels.arguments.Attend`."""
    copies: CopyPlan | None


@dataclass(frozen=True)
class Room:
    """Limit of a pass's memory. Its unit is the memory of one copied token."""

    tokens: int
    per_entry: int
    """What an entry takes, in all layers whose entries exist at once."""


@dataclass
class NewTailPlaces:
    """The tails that a pass leaves."""

    slots: list[int]
    lengths: list[int]
    tokens: mx.array
    """``[tokens]`` int32: the places of the tokens of new tails, then of kept tails
    (`PrefillStep.keeps_tail`)."""
    kept: tuple[slice, ...]
    """One slice of these tokens for each kept tail."""
    _starts: dict[int, mx.array] = field(default_factory=dict)

    def starts(self, tails: int) -> mx.array:
        """Return ``starts`` of `kernels.arguments.PutTails`. ``tails``: tail slots of the layer."""
        if tails not in self._starts:
            numbers, first = array("i", [0] * (2 * tails)), 0
            for slot, length in zip(self.slots, self.lengths, strict=True):
                numbers[2 * slot], numbers[2 * slot + 1] = first, length
                first += length
            self._starts[tails] = to_mlx(numbers).reshape(tails, 2)
        return self._starts[tails]


@dataclass(frozen=True)
class PassLayout:
    """Where a pass's tokens are, and what its kernels read."""

    pages: dict[int, mx.array]
    """By level: the places of the tokens of new pages, ``[pages * 64]`` int32."""
    tails: NewTailPlaces
    parts: tuple[Part, ...]
    copy_tokens: int
    """Number of tokens of the largest copies of a part."""
    room_tokens: int
    """What the pass takes, in the unit of `Room`: the copies, and the entries of all parts."""
    tiling: Tiling

    @staticmethod
    def of(step: PackedPrefill, room: Room, tiling: Tiling) -> PassLayout | None:
        """Return the layout of a pass; None if the copies of one row exceed the room.

        The pass has no splits if their entries do not fit beside the copies.
        """
        found = _Planner(step, room, tiling, splits=True).layout()
        if found.copy_tokens > room.tokens:
            return None
        if found.room_tokens > room.tokens:
            found = _Planner(step, room, tiling, splits=False).layout()
        return found


@dataclass
class _PartPlan:
    """A part under construction."""

    paged: array[int] = field(default_factory=lambda: array("i"))
    copied: array[int] = field(default_factory=lambda: array("i"))
    size: int = 0
    """Number of tokens of its copies."""
    tokens: int = 0
    tiles: list[tuple[int, ...]] = field(default_factory=list)
    entries: int = 0
    """Number of entries of its tokens; they are used only if ``has_splits``."""
    bounds: list[tuple[range, int]] = field(default_factory=list)
    """The first entries of each chunk's tokens, and how many each token has."""
    has_splits: bool = False

    def add_pages(self, locations: array[int]) -> int:
        """Plan copies of pages; return the index of their first token in the copies."""
        first, count = self.size, len(locations) // PAGE_NUMBERS
        self.size += PAGE_TOKENS * count
        locations = locations[:]
        locations[2::PAGE_NUMBERS] = array("i", range(first, self.size, PAGE_TOKENS))
        self.paged += locations
        return first

    def add_tokens(self, places: Sequence[int]) -> int:
        first = self.size
        self.size += len(places)
        self.copied += _pairs(places, range(first, self.size))
        return first

    def add_chunk(self, chunk: ChunkPlaces, most: int, splits: int) -> None:
        """Add a chunk, in tiles of at most ``most`` tokens."""
        self.tiles += chunk.tiles(most, splits)
        self.has_splits |= splits > 1
        entries = chunk.count * splits
        self.bounds.append((range(self.entries, self.entries + entries, splits), splits))
        self.entries += entries
        self.tokens += chunk.count

    def part(self) -> Part:
        levels = tuple(sorted(set(self.paged[::PAGE_NUMBERS])))
        index = {level: number for number, level in enumerate(levels)}
        paged = self.paged
        paged[::PAGE_NUMBERS] = array("i", map(index.__getitem__, paged[::PAGE_NUMBERS]))
        copies = None
        if self.size:
            copies = CopyPlan(
                levels,
                to_mlx(paged).reshape(-1, PAGE_NUMBERS) if paged else None,
                to_mlx(self.copied).reshape(-1, 2),
            )
        # Blocks start in this order. A block with many keys that starts late would run alone.
        self.tiles.sort(key=lambda tile: -(tile[3] + tile[6] + tile[8]))
        numbers = array("i", chain.from_iterable(self.tiles))
        if not self.has_splits:
            numbers[ENTRY_COLUMN::COLUMNS] = array("i", [-1]) * len(self.tiles)
        tiles = to_mlx(numbers).reshape(-1, COLUMNS)
        return Part(self.tokens, tiles, self._splits() if self.has_splits else None, copies)

    def _splits(self) -> TileSplits:
        rows = array("i", bytes(self.tokens * ROW_NUMBERS * array("i").itemsize))
        firsts = array("i", chain.from_iterable(firsts for firsts, _ in self.bounds))
        counts = chain.from_iterable(repeat(count, len(firsts)) for firsts, count in self.bounds)
        rows[ROW_NUMBERS - 2 :: ROW_NUMBERS] = firsts
        rows[ROW_NUMBERS - 1 :: ROW_NUMBERS] = array("i", map(add, firsts, counts))
        return TileSplits(self.entries, to_mlx(rows).reshape(-1, ROW_NUMBERS))


class _Planner:
    def __init__(self, step: PackedPrefill, room: Room, tiling: Tiling, *, splits: bool) -> None:
        self._room, self._tiling, self._splits = room, tiling, splits
        self._pages: dict[int, array[int]] = defaultdict(lambda: array("i"))
        self._slots, self._tails = list[int](), list[list[int]]()
        self._kept = list[list[int]]()
        self._parts = [_PartPlan()]
        self._end = 0
        for steps in by_row(step.steps):
            self._add_row(steps)
        self._add_padding(step.batch - self._end)
        for part in self._parts:
            if part.size and not part.copied:  # kernels get no empty arrays
                part.add_tokens([0])

    def _add_row(self, steps: Sequence[PrefillStep]) -> None:
        row, pages = steps[0].row, self._pages[steps[0].row.level]
        tail = [~(row.slot * TAIL_TOKENS + at) for at in range(steps[0].tail_length)]
        filled = len(pages) // PAGE_TOKENS
        new = range(filled, filled + sum(step.new_pages for step in steps[:-1]))
        locations = page_locations(row)
        for number in new:
            locations.extend((EARLIER + row.level, number, 0))
        part = self._part_for(len(locations) // PAGE_NUMBERS * PAGE_TOKENS, steps)
        paged, seen = part.add_pages(locations), PAGE_TOKENS * len(row.pages)
        for step in steps:
            outside = bool(tail) and tail[0] < 0
            copied = part.size, len(tail) if outside else 0
            if outside:
                part.add_tokens(tail)
            before = 0 if outside else len(tail)
            places = self._end, part.tokens, step.count, before, paged, seen, *copied
            splits = self._tiling.splits(step.count, seen) if self._splits else 1
            part.add_chunk(ChunkPlaces(*places, part.entries), self._tiling.tokens, splits)
            tail += range(self._end, self._end + step.count)
            self._end += step.count
            full = step.new_pages * PAGE_TOKENS
            seen += full
            pages.extend(tail[:full])
            del tail[:full]
            if step.keeps_tail:
                self._kept.append(tail[:])
        self._slots.append(row.slot)
        self._tails.append(tail)

    def _part_for(self, paged: int, steps: Sequence[PrefillStep]) -> _PartPlan:
        """Return the part for a row with ``paged`` tokens in pages; begin one if need be."""
        part, most = self._parts[-1], paged + sum(step.tail_length for step in steps)
        # A part without tails gets one token more.
        if part.size and part.size + most > self._room.tokens - 1:
            self._parts.append(part := _PartPlan())
        return part

    def _add_padding(self, count: int) -> None:
        """Add tiles for tokens without keys, whose results are zeros."""
        part = self._parts[-1]
        if part.has_splits:
            part.bounds.append((range(count), 0))
        else:
            part.tiles += empty_tiles(part.tokens, count, self._tiling.tokens)
        part.tokens += count

    def layout(self) -> PassLayout:
        lengths = [*map(len, self._tails)]
        copied = max(part.size for part in self._parts)
        entries = sum(part.entries for part in self._parts if part.has_splits)
        tails = chain.from_iterable([*self._tails, *self._kept])
        return PassLayout(
            {level: to_mlx(places) for level, places in self._pages.items() if places},
            NewTailPlaces(
                self._slots,
                lengths,
                to_mlx(array("i", tails)),
                spans_of(self._kept, sum(lengths)),
            ),
            tuple(part.part() for part in self._parts),
            copied,
            copied + self._room.per_entry * entries,
            self._tiling,
        )


def _pairs(left: Iterable[int], right: Sequence[int]) -> array[int]:
    """Return left[0], right[0], left[1], …; by slices, because a loop would be slow."""
    found = array("i", bytes(2 * len(right) * array("i").itemsize))
    found[::2], found[1::2] = array("i", left), array("i", right)
    return found
