"""What one forward pass does to the cache, worked out once for all layers.

A step is made of host integers and a few small index arrays; the layers' caches and attention
read it. Rows are never padded to a rectangle: the pages are a flat list, each with its row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.cache.packed import PageIndex
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages

TAIL_TOKENS = 3 * PAGE_TOKENS
"""Room in a tail: up to 127 exact tokens, and quantized ones that await a flush.

With three pages of room a row asks for a flush once in 64 to 128 tokens of its own.
"""


@dataclass(frozen=True)
class LevelTable:
    """The pages of one level that a batch attends to."""

    level: int
    slots: mx.array
    """``[pages]`` uint32: where they are in the level's pools."""
    rows: mx.array
    """``[pages]`` uint32: whose they are, as an index into the batch; ascending."""
    _indices: dict[int, tuple[PageIndex, PageIndex]] = field(default_factory=dict)

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


def level_tables(rows: list[Row]) -> list[LevelTable]:
    """Build the tables of a batch: row after row, each row's pages in order."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for index, row in enumerate(rows):
        for page in row.pages:
            slots, owners = found.setdefault(page.level, ([], []))
            slots.append(page.slot)
            owners.append(index)
    return [
        LevelTable(level, mx.array(slots, mx.uint32), mx.array(owners, mx.uint32))
        for level, (slots, owners) in sorted(found.items())
    ]


@dataclass(frozen=True)
class Seal:
    """Rows of a decode step that quantize their oldest 64 exact tokens, to the same level."""

    level: int
    rows: list[Row]
    slots: mx.array
    """``[rows]``: their tails."""
    blocks: mx.array
    """``[rows]``: which 64 tokens of the tail, 0 to 2."""
    positions: mx.array
    """``[rows, 64]``: those tokens' places in the tail."""


@dataclass(frozen=True)
class DecodeStep:
    """One new token for each of ``rows``; their lengths already count it."""

    rows: list[Row]
    offsets: mx.array
    """``[batch]`` int32: positions of the new tokens; the batch may be padded behind the rows."""
    slots: mx.array
    """``[rows]``: tails; ``whole`` if they are 0, 1, 2 ... up to the pool's end."""
    whole: bool
    positions: mx.array
    """``[rows]``: where the new token goes in its tail."""
    tail_lengths: mx.array
    """``[rows]``: tokens in the tails, the new one included."""
    tables: list[LevelTable]
    seals: list[Seal]
    """One for each level that a row seals to in this step."""


@dataclass(frozen=True)
class PrefillStep:
    """``count`` new tokens of one row, whose length does not count them yet."""

    row: Row
    count: int
    tail_length: int
    tables: list[LevelTable]
    new_pages: int

    @property
    def offset(self) -> int:
        """Position of the first new token."""
        return self.row.length


def decode_step(
    rows: list[Row], tables: list[LevelTable], batch: int, tail_slots: int
) -> DecodeStep:
    """Append one token to each row, and say what that means for the tails."""
    positions = [row.tail_length for row in rows]
    offsets = [row.length for row in rows] + [0] * (batch - len(rows))
    sealed: dict[int, list[Row]] = {}
    for row in rows:
        if row.tail_length >= TAIL_TOKENS:
            raise ValueError("a tail is full: flush before the step")
        row.length += 1
        if len(row.pages) + row.pending < full_pages(row.length):
            sealed.setdefault(row.level, []).append(row)
    seals = [_seal(level, due) for level, due in sorted(sealed.items())]
    slots = [row.slot for row in rows]
    return DecodeStep(
        rows,
        offsets=mx.array(offsets, mx.int32),
        slots=mx.array(slots),
        whole=slots == list(range(tail_slots)),
        positions=mx.array(positions),
        tail_lengths=mx.array([p + 1 for p in positions]),
        tables=tables,
        seals=seals,
    )


def _seal(level: int, rows: list[Row]) -> Seal:
    starts = mx.array([row.pending * PAGE_TOKENS for row in rows])
    seal = Seal(
        level,
        rows,
        slots=mx.array([row.slot for row in rows]),
        blocks=mx.array([row.pending for row in rows]),
        positions=starts[:, None] + mx.arange(PAGE_TOKENS),
    )
    for row in rows:
        row.pending += 1
    return seal


def prefill_step(row: Row, count: int) -> PrefillStep:
    """Plan ``count`` new tokens of a row that has nothing pending."""
    if row.pending:
        raise ValueError("the row awaits a flush")
    return PrefillStep(
        row,
        count,
        tail_length=row.tail_length,
        tables=level_tables([row]),
        new_pages=full_pages(row.length + count) - len(row.pages),
    )
