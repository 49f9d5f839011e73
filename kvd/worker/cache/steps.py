"""What one forward pass does to the cache, worked out once for all layers.

A step is made of host integers and a few small index arrays; the layers' caches and attention
read it. Rows are never padded to a rectangle: the pages are a flat list, each with its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.backend import BackendPrefill, BackendStep
from kvd.worker.cache.packed import PageIndex
from kvd.worker.cache.page_list import places_of
from kvd.worker.cache.rows import TAIL_TOKENS, Row
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages


@dataclass(frozen=True)
class LevelTable:
    """The pages of one level that a batch attends to."""

    level: int
    slots: mx.array
    """``[pages]`` uint32: where they are in the level's pools."""
    rows: mx.array
    """``[pages]`` uint32: whose they are, as an index into the batch; ascending."""
    owners: tuple[int, ...]
    """The same, on the host."""
    starts: tuple[int, ...]
    """Position of each page's first token."""
    padding: int = 0
    """How often the last page stands here again, so that steps have few shapes; nobody sees it."""
    _indices: dict[int, tuple[PageIndex, PageIndex]] = field(default_factory=dict)
    _padded: dict[int, LevelTable] = field(default_factory=dict)

    def padded(self, pages: int) -> LevelTable:
        """Return the same table with room for so many pages.

        The padding is the last page again, of the same row: what is in it can hurt nobody else.
        """
        more = pages - len(self.owners)
        if not more:
            return self
        if pages not in self._padded:
            owners, starts = (one + one[-1:] * more for one in (self.owners, self.starts))
            slots = mx.concatenate([self.slots, mx.broadcast_to(self.slots[-1:], (more,))])
            self._padded[pages] = LevelTable(
                self.level, slots, mx.array(owners, mx.uint32), owners, starts, more
            )
        return self._padded[pages]

    @cached_property
    def there(self) -> mx.array | None:
        """``[pages, 1]`` bool: which are no padding; None: all."""
        if not self.padding:
            return None
        count = len(self.owners)
        return mx.arange(count)[:, None] < count - self.padding

    def with_arrays(
        self, slots: mx.array, rows: mx.array, indices: dict[int, tuple[PageIndex, PageIndex]]
    ) -> LevelTable:
        """Return the same table over other arrays: those of a function that is being traced."""
        return LevelTable(self.level, slots, rows, self.owners, self.starts, self.padding, indices)

    def indices(self, heads: int) -> tuple[PageIndex, PageIndex]:
        """Return the index for an operand with one entry a row, and for one with one a page."""
        if heads not in self._indices:
            each = mx.arange(heads, dtype=mx.uint32)
            pages = mx.arange(self.slots.size, dtype=mx.uint32)
            right, by_row, by_page = (
                which[:, None] * heads + each for which in (self.slots, self.rows, pages)
            )
            self._indices[heads] = (PageIndex(by_row, right), PageIndex(by_page, right))
        return self._indices[heads]


def level_tables(parts: Sequence[np.ndarray]) -> list[LevelTable]:
    """Build the tables of a batch of which each row has its `places_of`: row after row."""
    if not parts:
        return []
    places = np.concatenate(parts)
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    tables = []
    for level in np.flatnonzero(np.bincount(places[:, 0])).tolist():
        here = places[:, 0] == level
        slots, mine = (mx.array(one[here].astype(np.uint32)) for one in (places[:, 1], owners))
        starts = tuple(places[here, 2].tolist())
        tables.append(LevelTable(level, slots, mine, tuple(owners[here].tolist()), starts))
    return tables


class Sight:
    """What a decode step's queries see of pages and tails, where a window hides some of it."""

    def __init__(self, kind: Kind, rows: list[Row]) -> None:
        self._kind = kind
        self._lows = [kind.low(row.length - 1) for row in rows]
        self._tail_starts = [row.tail_start for row in rows]
        self._pages: dict[int, mx.array | None] = {}
        self._tails: mx.array | None = None

    def _hides(self, low: int, start: int, count: int = PAGE_TOKENS) -> bool:
        return start < low and start + count > self._kind.keep

    def pages(self, table: LevelTable) -> mx.array | None:
        """Return ``[pages, 64]`` bool: what is seen of each page; None if all of it."""
        if table.level not in self._pages:
            lows = [self._lows[owner] for owner in table.owners]
            hides = any(map(self._hides, lows, table.starts))
            self._pages[table.level] = (
                self._seen(lows, list(table.starts), PAGE_TOKENS) if hides else None
            )
        return self._pages[table.level]

    def tails(self) -> mx.array | None:
        """Return ``[rows, TAIL_TOKENS]`` bool: what a window leaves of the tails; None: all."""
        places = zip(self._lows, self._tail_starts, strict=True)
        if self._tails is None and any(self._hides(*place, TAIL_TOKENS) for place in places):
            self._tails = self._seen(self._lows, self._tail_starts, TAIL_TOKENS)
        return self._tails

    def _seen(self, lows: list[int], starts: list[int], count: int) -> mx.array:
        positions = mx.array(starts)[:, None] + mx.arange(count)
        return (positions >= mx.array(lows)[:, None]) | (positions < self._kind.keep)


@dataclass(frozen=True)
class DecodeStep:
    """One new token for each of ``rows``; their lengths already count it."""

    rows: list[Row]
    batch: int
    """Sequences that the model sees: the rows, then padding."""
    lengths: tuple[int, ...]
    """Of the rows, the new tokens included."""
    slots: mx.array
    """``[rows]``: tails; ``whole`` if they are 0, 1, 2 ... up to the pool's end."""
    whole: bool
    places: mx.array
    """``[tails]`` int32: where each tail takes a new token, -1: it takes none; and `TAIL_TOKENS`
    more in tails whose row has `turned`."""
    turned: tuple[Row, ...]
    """Rows that read one page more from this step on. What is behind it in their tails moves up
    before a token is taken."""
    givers: mx.array | None
    """``[tails]``: whose token that is; None if the rows are the tails, in their order."""
    tail_lengths: mx.array
    """``[rows]``: tokens in the tails, the new one included."""
    find_tables: Callable[[], list[LevelTable]]
    sight: Sight | None
    """None where every row sees all that it has."""
    backend: BackendStep | None = None
    """The same for attention that is one operation a layer, where that is used."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What one layer works out and the next ones use again."""

    @cached_property
    def tables(self) -> list[LevelTable]:
        """The pages, by level; made when somebody asks, since backends have their own lists."""
        return self.find_tables()

    def taken(self) -> mx.array:
        """Return which places of the tails take a new token, ``[tails, 1, TAIL_TOKENS, 1]``."""
        if "taken" not in self.shared:
            places = self.places[:, None]
            taken = (mx.arange(TAIL_TOKENS) == places % TAIL_TOKENS) & (places >= 0)
            self.shared["taken"] = taken[:, None, :, None]
        found: mx.array = self.shared["taken"]
        return found

    def tails_seen(self) -> mx.array:
        """Return what the queries see of the tails, ``[rows, TAIL_TOKENS]`` bool."""
        if "tails" not in self.shared:
            seen = mx.arange(TAIL_TOKENS) < self.tail_lengths[:, None]
            if self.sight is not None and (window := self.sight.tails()) is not None:
                seen = seen & window
            self.shared["tails"] = seen
        found: mx.array = self.shared["tails"]
        return found

    @staticmethod
    def pages_key(table: LevelTable) -> str:
        """Return under which name `shared` has what is seen of a table's pages."""
        return f"pages of level {table.level}"

    def pages_seen(self, table: LevelTable) -> mx.array | None:
        """Return what they see of a table's pages, ``[pages, 64 or 1]`` bool; None: all."""
        key = self.pages_key(table)
        if key not in self.shared:
            seen = None if self.sight is None else self.sight.pages(table)
            if table.there is not None:
                seen = table.there if seen is None else seen & table.there
            self.shared[key] = seen
        found: mx.array | None = self.shared[key]
        return found

    @property
    def offsets(self) -> mx.array:
        """Positions of the new tokens, ``[batch]`` int32; 0 for the padding."""
        if "offsets" not in self.shared:
            padding = [0] * (self.batch - len(self.rows))
            offsets = [length - 1 for length in self.lengths]
            self.shared["offsets"] = mx.array(offsets + padding, mx.int32)
        found: mx.array = self.shared["offsets"]
        return found


@dataclass(frozen=True)
class PrefillStep:
    """``count`` new tokens of one row, whose length does not count them yet."""

    row: Row
    count: int
    offset: int
    """Position of the first new token."""
    tail_length: int
    tables: list[LevelTable]
    new_pages: int
    backend: BackendPrefill | None = None
    """The same for attention that is one operation a layer, where that is used."""
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def tail_start(self) -> int:
        """Position of the first token that is not in a page."""
        return self.offset - self.tail_length


def decode_step(
    rows: list[Row],
    find_tables: Callable[[], list[LevelTable]],
    batch: int,
    tail_slots: int,
    kind: Kind,
) -> DecodeStep:
    """Append one token to each row, and say what that means for the tails."""
    turned = tuple(row for row in rows if row.at_the_end)
    if not all(row.early for row in turned):
        raise ValueError("a tail is full: flush before the step")
    for row in turned:
        row.turn_page()
    moved = {row.slot: TAIL_TOKENS for row in turned}
    slots = [row.slot for row in rows]
    places, givers = [-1] * tail_slots, [0] * tail_slots
    for giver, row in enumerate(rows):
        places[row.slot], givers[row.slot] = row.tail_length + moved.get(row.slot, 0), giver
        row.length += 1
    whole = slots == list(range(tail_slots))
    return DecodeStep(
        rows,
        batch,
        tuple(row.length for row in rows),
        slots=mx.array(slots),
        whole=whole,
        places=mx.array(places, mx.int32),
        givers=None if whole else mx.array(givers),
        tail_lengths=mx.array([row.tail_length for row in rows]),
        turned=turned,
        find_tables=find_tables,
        sight=Sight(kind, rows) if kind.bounded else None,
    )


def prefill_step(row: Row, count: int) -> PrefillStep:
    """Plan ``count`` new tokens of a row that has nothing early."""
    return PrefillStep(
        row,
        count,
        offset=row.length,
        tail_length=row.tail_length,
        tables=level_tables([places_of(row)]),
        new_pages=max(0, full_pages(row.length + count) - row.paged),
    )
