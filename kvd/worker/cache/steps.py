"""What one forward pass does to the cache, computed once for all layers.

A step consists of host integers and a few small index arrays. Rows of different lengths need no
padding: the pages of a batch form a flat list, each with the index of its row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, Protocol, cast

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layer import Chunk, LayerStore
from kvd.worker.cache.page_tables import (
    EARLIER,
    PAGE_NUMBERS,
    LevelTable,
    PageList,
    level_tables,
    page_locations,
    to_mlx,
)
from kvd.worker.cache.pass_places import PassPlaces, PlannedChunk
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from protocol.memory_bounds import KEPT_FROM
from protocol.pages import TAIL_TOKENS


class BackendStep(Protocol):
    """A backend's description of one decode step."""

    @property
    def moves_tails(self) -> bool:
        """Whether `append` also moves the tail tokens after a committed page to the front."""

    @property
    def pages(self) -> PageList: ...

    def append(self, layer: LayerStore, step: DecodeStep, keys: mx.array, values: mx.array) -> None:
        """Write one token per row into its tail, ``[rows or more, heads, 1, dim]``; lazy."""

    def attend(
        self, queries: mx.array, layer: LayerStore, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend one query per row, like `kvd.worker.attention.decode.decode_attention`."""

    # For compiled steps (`kvd.worker.serving.compiled`).

    def padded(self) -> BackendStep:
        """Return the step with its lists padded to one of few lengths."""

    def shapes(self, step: DecodeStep) -> tuple[Any, ...]:
        """Return what else determines the shapes of `arrays`, besides row count and levels."""

    def arrays(self, step: DecodeStep) -> list[mx.array]:
        """Return the arrays that this step reads, except tails and pools."""

    def with_arrays(self, step: DecodeStep, given: Iterator[mx.array]) -> DecodeStep:
        """Return the step with the next arrays of ``given`` instead of its own `arrays`."""


class BackendPrefill(Protocol):
    """A backend's description of one chunk of a row's prompt."""

    def attend(
        self,
        queries: mx.array,
        layer: LayerStore,
        chunk: Chunk,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend a chunk, like `kvd.worker.attention.prefill.prefill_attention`."""


class WindowMask:
    """The tokens of pages and tails that a decode step's queries see through a window."""

    def __init__(self, kind: Kind, rows: list[Row]) -> None:
        self._kind = kind
        self._lows = [kind.low(row.length - 1) for row in rows]
        self._tail_starts = [row.tail_start for row in rows]
        self._pages: dict[int, mx.array | None] = {}
        self._tails: mx.array | None = None

    def _hides_some(self, low: int, start: int, count: int = PAGE_TOKENS) -> bool:
        return start < low and start + count > self._kind.keep

    def pages(self, table: LevelTable) -> mx.array | None:
        """Return ``[pages, 64]`` bool, or None if every token of these pages is visible."""
        if table.level not in self._pages:
            lows = [self._lows[owner] for owner in table.owners]
            hides = any(map(self._hides_some, lows, table.starts))
            self._pages[table.level] = (
                self._visible(lows, list(table.starts), PAGE_TOKENS) if hides else None
            )
        return self._pages[table.level]

    def tails(self) -> mx.array | None:
        """Return ``[rows, TAIL_TOKENS]`` bool, or None if the window hides no tail token."""
        places = zip(self._lows, self._tail_starts, strict=True)
        if self._tails is None and any(self._hides_some(*place, TAIL_TOKENS) for place in places):
            self._tails = self._visible(self._lows, self._tail_starts, TAIL_TOKENS)
        return self._tails

    def _visible(self, lows: list[int], starts: list[int], count: int) -> mx.array:
        positions = mx.array(starts)[:, None] + mx.arange(count)
        return (positions >= mx.array(lows)[:, None]) | (positions < self._kind.keep)


@dataclass(frozen=True)
class DecodeStep:
    """One new token for each of ``rows``. Their lengths already count it."""

    rows: list[Row]
    batch: int
    """Sequences that the model sees: the rows, then padding."""
    lengths: tuple[int, ...]
    slots: mx.array
    all_tails: bool
    """Whether ``slots`` is 0, 1, 2 ... to the end of the tail arrays."""
    token_places: mx.array
    """``[tails]`` int32: index at which each tail takes its new token, or -1. For rows in
    `committed`, `TAIL_TOKENS` is added."""
    committed: tuple[Row, ...]
    """Rows that commit a page with this step. The tail tokens after that page move to the front
    before the new token is written."""
    token_rows: mx.array | None
    """``[tails]``: index of the batch row whose token each tail takes. None if the rows are exactly
    the tails, in order."""
    tail_lengths: mx.array
    """``[rows]``: tokens in the tails, including the new one."""
    build_tables: Callable[[], list[LevelTable]]
    window: WindowMask | None
    """None where every row sees all its tokens."""
    backend: BackendStep | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that one layer computes and the next layers reuse."""

    @cached_property
    def tables(self) -> list[LevelTable]:
        """The pages by level. Built on first use, since backends have their own lists."""
        return self.build_tables()

    def append(self, layer: LayerStore, keys: mx.array, values: mx.array) -> None:
        """Write one token per row into a layer's tails, ``[rows or more, heads, 1, dim]``; lazy."""
        if self.backend is not None:
            self.backend.append(layer, self, keys, values)
            return
        rows = slice(len(self.rows)) if self.token_rows is None else self.token_rows
        layer.put_tokens(self.written_places(), keys[rows], values[rows])

    def tails(self, layer: LayerStore) -> tuple[mx.array, mx.array]:
        """Return the rows' tails in a layer, ``[rows, heads, TAIL_TOKENS, dim]``."""
        if self.all_tails:
            return layer.tail_keys, layer.tail_values
        return layer.tail_keys[self.slots], layer.tail_values[self.slots]

    def written_places(self) -> mx.array:
        """Return which places of the tails take a new token, ``[tails, 1, TAIL_TOKENS, 1]``."""
        if "written" not in self.shared:
            places = self.token_places[:, None]
            written = (mx.arange(TAIL_TOKENS) == places % TAIL_TOKENS) & (places >= 0)
            self.shared["written"] = written[:, None, :, None]
        return cast("mx.array", self.shared["written"])

    def visible_tails(self) -> mx.array:
        """Return which tail tokens the queries see, ``[rows, TAIL_TOKENS]`` bool."""
        if "tails" not in self.shared:
            visible = mx.arange(TAIL_TOKENS) < self.tail_lengths[:, None]
            if self.window is not None and (window := self.window.tails()) is not None:
                visible = visible & window
            self.shared["tails"] = visible
        return cast("mx.array", self.shared["tails"])

    @staticmethod
    def pages_key(table: LevelTable) -> str:
        return f"pages of level {table.level}"

    def visible_pages(self, table: LevelTable) -> mx.array | None:
        """Return which tokens of a table's pages are visible, ``[pages, 64 or 1]``; None: all."""
        key = self.pages_key(table)
        if key not in self.shared:
            visible = None if self.window is None else self.window.pages(table)
            if table.real_pages is not None:
                visible = table.real_pages if visible is None else visible & table.real_pages
            self.shared[key] = visible
        return cast("mx.array | None", self.shared[key])

    @property
    def offsets(self) -> mx.array:
        """Positions of the new tokens, ``[batch]`` int32; 0 for padding."""
        if "offsets" not in self.shared:
            padding = [0] * (self.batch - len(self.rows))
            offsets = [length - 1 for length in self.lengths]
            self.shared["offsets"] = mx.array(offsets + padding, mx.int32)
        return cast("mx.array", self.shared["offsets"])


@dataclass(frozen=True)
class PrefillStep:
    """``count`` new tokens of one row. Its length does not count them yet."""

    row: Row
    count: int
    offset: int
    """Position of the first new token."""
    tail_length: int
    tables: list[LevelTable]
    """The row's pages before the pass."""
    new_pages: int
    continues: bool = False
    """Whether the chunk before this one, in the same pass, is of the same row."""
    earlier: tuple[int, ...] = ()
    """Numbers of pages that earlier chunks of this row in the same pass fill, without zeros."""
    keeps_tail: bool = False
    """Whether the tail at the chunk's end is kept for a snapshot, because another chunk of the row
    follows in the same pass."""
    backend: BackendPrefill | None = None
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def tail_start(self) -> int:
        """Position of the first token that is not in a page."""
        return self.offset - self.tail_length

    def earlier_starts(self) -> list[tuple[int, ...]]:
        """Return, for each of `earlier`, the position of the first token of each page."""
        first = self.tail_start - PAGE_TOKENS * sum(self.earlier)
        starts = tuple(range(first, self.tail_start, PAGE_TOKENS))
        ends = [0, *accumulate(self.earlier)]
        return [starts[start:end] for start, end in pairwise(ends)]

    def page_list(self, kind: Kind) -> PageList:
        """Return the pages that the chunk may see, for backends.

        Levels from `EARLIER` on stand for `Chunk.earlier`.
        """
        pages = page_locations(self.row)
        for number, starts in enumerate(self.earlier_starts()):
            for slot, start in enumerate(starts):
                pages.extend((EARLIER + number, slot, start))
        if self.continues and kind.bounded:  # as if these pages had been freed between two passes
            low = kind.low(self.offset)
            each = zip(
                *(pages[number::PAGE_NUMBERS] for number in range(PAGE_NUMBERS)), strict=True
            )
            seen = (page for page in each if page[2] + PAGE_TOKENS > low or page[2] < kind.keep)
            pages = array("i", chain.from_iterable(seen))
        return PageList.joined([pages])

    @cached_property
    def places(self) -> PassPlaces:
        """Where the tokens come from and go to, if the pass has no other chunk."""
        return PassPlaces.of((self.planned,))

    @property
    def planned(self) -> PlannedChunk:
        """What the places of its pass depend on."""
        sizes = self.count, self.tail_length, self.new_pages
        return PlannedChunk(self.row.slot, self.row.level, *sizes, self.continues, self.keeps_tail)

    def append(self, layer: LayerStore, keys: mx.array, values: mx.array) -> Chunk:
        """Give a layer the chunk's keys and values, ``[1, heads, count, dim]``; lazy."""
        # Not `keys[0]`: with an int as the only index, MLX gathers, which copies.
        sides = (side.squeeze(0).swapaxes(0, 1) for side in (keys, values))
        (chunk,) = layer.put_chunks(self.places, *sides)
        return chunk


def decode_step(
    rows: list[Row],
    build_tables: Callable[[], list[LevelTable]],
    batch: int,
    tail_slots: int,
    kind: Kind,
) -> DecodeStep:
    """Append one token to each row, and compute what that does to the tails.

    Raises ``ValueError``, with nothing changed, if a row commits a page that no flush has written.
    """
    committed = tuple(row for row in rows if row.commits_next)
    if not all(row.written_ahead for row in committed):
        raise ValueError("a tail is full: flush before the step")
    for row in committed:
        row.commit_page()
    moved = {row.slot: TAIL_TOKENS for row in committed}
    slots = [row.slot for row in rows]
    places, token_rows = [-1] * tail_slots, [0] * tail_slots
    for index, row in enumerate(rows):
        places[row.slot] = row.tail_length + moved.get(row.slot, 0)
        token_rows[row.slot] = index
        row.length += 1
    all_tails = slots == list(range(tail_slots))
    return DecodeStep(
        rows,
        batch,
        tuple(row.length for row in rows),
        slots=mx.array(slots),
        all_tails=all_tails,
        token_places=mx.array(places, mx.int32),
        committed=committed,
        token_rows=None if all_tails else mx.array(token_rows),
        tail_lengths=mx.array([row.tail_length for row in rows]),
        build_tables=build_tables,
        window=WindowMask(kind, rows) if kind.bounded else None,
    )


def prefill_step(row: Row, count: int, previous: PrefillStep | None = None) -> PrefillStep:
    """Plan ``count`` new tokens of a row that has no page written ahead.

    ``previous``: the row's chunk before this one, if the same pass has it.
    """
    if previous is None:
        offset, paged = row.length, row.paged
        earlier: tuple[int, ...] = ()
        tables = level_tables([page_locations(row)])
    else:
        offset, tables = previous.offset + previous.count, previous.tables
        paged = previous.tail_start // PAGE_TOKENS + previous.new_pages
        earlier = (*previous.earlier, *([previous.new_pages] if previous.new_pages else []))
    return PrefillStep(
        row,
        count,
        offset,
        tail_length=offset - PAGE_TOKENS * paged,
        tables=tables,
        new_pages=max(0, full_pages(offset + count) - paged),
        continues=previous is not None,
        earlier=earlier,
    )


@dataclass(frozen=True)
class PackedPrefill:
    """Chunks of one or more rows in one pass that has the shape of a decode step.

    ::

        batch    a a a a a a b b A A A A A .     a, b: chunks of two rows; A: row a's next chunk
                 |<------ ``batch`` ----->|      .: padding, which the cache does not keep

    The model sees each token as a sequence of its own, at the token's position. Its products see
    one large batch, without padding between chunks. Only attention knows the chunks: each has its
    own `PrefillStep`, and attends, fills pages and writes a tail as in a pass of its own. Chunks of
    one row are consecutive, and a later one sees the earlier ones as pages and tail.
    """

    steps: tuple[PrefillStep, ...]
    batch: int
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that one layer computes and the next layers reuse."""

    @cached_property
    def places(self) -> PassPlaces:
        """Where the tokens come from and go to."""
        return PassPlaces.of(tuple(step.planned for step in self.steps))

    def append(self, layer: LayerStore, keys: mx.array, values: mx.array) -> list[Chunk]:
        """Give a layer the keys and values of all chunks, ``[batch, heads, 1, dim]``; lazy."""
        return layer.put_chunks(self.places, keys.squeeze(2), values.squeeze(2))

    @cached_property
    def positions(self) -> mx.array:
        """Positions of the tokens, ``[batch]`` int32; 0 for padding."""
        found = array("i")
        for step in self.steps:
            found.extend(range(step.offset, step.offset + step.count))
        found.extend(repeat(0, self.batch - len(found)))
        return to_mlx(found)

    def parts(self) -> Iterator[slice]:
        """Yield where each chunk's tokens are in the batch."""
        start = 0
        for step in self.steps:
            yield slice(start, start + step.count)
            start += step.count


def packed_prefill(
    rows: Sequence[Row], counts: Sequence[int], batch: int, *, keeps_tails: bool = False
) -> PackedPrefill:
    """Plan one pass over chunks of ``counts`` tokens; a row may occur several times in succession.

    ``keeps_tails``: whether snapshots may be taken at the ends of chunks inside the pass.

    Raises ``ValueError`` if a chunk is empty or the batch too small.
    """
    if min(counts, default=0) < 1 or sum(counts) > batch:
        raise ValueError(f"chunks of {list(counts)} tokens do not fit a batch of {batch}")
    steps: list[PrefillStep] = []
    for row, count in zip(rows, counts, strict=True):
        previous = steps[-1] if steps and steps[-1].row is row else None
        if keeps_tails and previous is not None and previous.count >= KEPT_FROM:
            steps[-1] = replace(previous, keeps_tail=True)
        steps.append(prefill_step(row, count, previous))
    return PackedPrefill(tuple(steps), batch)
