"""Where the tokens of a packed prefill are for its kernels, computed once for all layers.

Attention reads each chunk at consecutive *places*, padded at the end to whole pages, which have 8
tokens in this drawing::

    batch    a a a b b b b b c c c c .             chunks of three rows, and padding
    places   a a a . . . . . b b b b b . . . c c c c . . . .

Chunks that are attended in one call have the same width, and come first. A chunk whose row has no
tokens before it attends to its places as they are. Any other has a dense copy of its row's pages,
of the tail before it, and of itself. These copies follow each other in one array, as far as the
scratch allows.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import mlx.core as mx

from kvd.worker.attention.kernels.unpack import PADDING
from kvd.worker.cache.padded_sizes import padded_width
from kvd.worker.cache.page_tables import EARLIER, PAGE_NUMBERS, page_locations, to_mlx
from kvd.worker.cache.pass_places import by_row
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.steps import PackedPrefill, PrefillStep
from protocol.pages import TAIL_TOKENS

TOGETHER = 4
"""First chunks in one call. With any number of them, there would be too many shapes to plan."""
MOST_PARTS = 16
"""Most results of calls that one `gather` kernel reads. More are joined first."""


@dataclass(frozen=True)
class DenseCopies:
    """Dense copies of some chunks' keys and values, made by one kernel."""

    tokens: int
    """Number of tokens of all copies."""
    levels: tuple[int, ...]
    """Levels of the pages. Those from `EARLIER` on: pages that the pass itself fills."""
    paged: mx.array | None
    """As in `kernels.arguments.Unpack`."""
    copied: mx.array


@dataclass(frozen=True)
class Call:
    """Chunks that are attended in one call of the dense kernel."""

    chunks: tuple[int, ...]
    """Their indices in the pass."""
    width: int
    """Places of each chunk."""
    first: int
    """The first place."""
    copies: int | None = None
    """Index in `PassLayout.copies`; None: the chunks attend to their own places only."""
    tokens: slice | None = None
    """What the chunk attends to in these copies."""

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + len(self.chunks) * self.width)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key."""
        keys = self.width if self.tokens is None else self.tokens.stop - self.tokens.start
        return len(self.chunks) * self.width * keys


@dataclass
class NewTailPlaces:
    """The tails that a pass leaves."""

    slots: list[int]
    lengths: list[int]
    tokens: mx.array
    """``[tokens]`` int32: the places of all their tokens, tail by tail."""
    _starts: dict[int, mx.array] = field(default_factory=dict)

    def starts(self, tails: int) -> mx.array:
        """Return ``starts`` of `kernels.arguments.PutTails` for this number of tails."""
        if tails not in self._starts:
            numbers, first = array("i", [0] * (2 * tails)), 0
            for slot, length in zip(self.slots, self.lengths, strict=True):
                numbers[2 * slot], numbers[2 * slot + 1] = first, length
                first += length
            self._starts[tails] = to_mlx(numbers).reshape(tails, 2)
        return self._starts[tails]


@dataclass(frozen=True)
class PassLayout:
    """Where a pass's tokens are, and what its kernels and calls of attention read."""

    sources: mx.array
    """``[places]`` int32: the token of each place; -1: padding."""
    pages: dict[int, mx.array]
    """By level: the places of the tokens of new pages, ``[pages * 64]`` int32."""
    tails: NewTailPlaces
    calls: tuple[Call, ...]
    copies: tuple[DenseCopies, ...]
    rows: mx.array | None
    """For each token, the call and the row in its result, ``[batch, 2]`` int32 (call -1: padding).
    With more than `MOST_PARTS` calls, 0 and the row in all results, joined. None: there is one
    call, whose rows are the batch."""

    @staticmethod
    def of(step: PackedPrefill, most_tokens: int) -> PassLayout | None:
        """Return the layout of a pass, or None if a chunk attends to more than ``most_tokens``.

        ``most_tokens``: limit for one chunk, and for the dense copies of one kernel, with padding.
        """
        planner = _Planner(step, most_tokens)
        return planner.layout() if planner.fits else None


class _Planner:
    def __init__(self, step: PackedPrefill, most_tokens: int) -> None:
        self._step, self._steps, self._most_tokens = step, step.steps, most_tokens
        self._first: dict[int, int] = {}
        """The first place of each chunk."""
        self._pages: dict[int, array[int]] = defaultdict(lambda: array("i"))
        self._slots, self._kept = list[int](), list[list[int]]()
        self._copied: dict[int, tuple[array[int], list[int]]] = {}
        """For each chunk with a dense copy: locations of its pages, and places of other tokens."""
        self._groups = _together(self._steps)
        end = 0
        for chunk in chain.from_iterable(self._groups):
            self._first[chunk] = end
            end += padded_width(self._steps[chunk].count)
        self._end = end
        chunk = 0
        for some in by_row(self._steps):
            self._add_row(chunk, some)
            chunk += len(some)
        self.fits = all(self._tokens_of(chunk) <= most_tokens for chunk in self._first)

    def _add_row(self, first_chunk: int, steps: Sequence[PrefillStep]) -> None:
        row, start = steps[0].row, steps[0].row.slot * TAIL_TOKENS
        places = [~place for place in range(start, start + steps[0].tail_length)]
        earlier = array("i")
        for chunk, step in enumerate(steps, first_chunk):
            first = self._first[chunk]
            places += range(first, first + step.count)
            if step.offset:
                padding = padded_width(step.count) - step.count
                locations = page_locations(row) + earlier
                self._copied[chunk] = locations, [*places, *repeat(PADDING, padding)]
            full = step.new_pages * PAGE_TOKENS
            pages = self._pages[row.level]
            filled = len(pages) // PAGE_TOKENS
            for number in range(filled, filled + step.new_pages):
                earlier.extend((EARLIER + row.level, number, 0))
            pages.extend(places[:full])
            del places[:full]
        self._slots.append(row.slot)
        self._kept.append(places)

    def _tokens_of(self, chunk: int) -> int:
        if chunk not in self._copied:
            return padded_width(self._steps[chunk].count)
        locations, places = self._copied[chunk]
        return len(locations) // PAGE_NUMBERS * PAGE_TOKENS + len(places)

    def layout(self) -> PassLayout:
        calls, copies = self._calls()
        return PassLayout(
            self._sources(),
            {level: to_mlx(places) for level, places in self._pages.items() if places},
            NewTailPlaces(
                self._slots,
                [*map(len, self._kept)],
                to_mlx(array("i", chain.from_iterable(self._kept))),
            ),
            calls,
            copies,
            self._rows(calls),
        )

    def _sources(self) -> mx.array:
        found = array("i", [-1]) * self._end
        for chunk, part in enumerate(self._step.parts()):
            first = self._first[chunk]
            found[first : first + part.stop - part.start] = array("i", range(part.start, part.stop))
        return to_mlx(found)

    def _calls(self) -> tuple[tuple[Call, ...], tuple[DenseCopies, ...]]:
        calls, copies, waiting, rows = list[Call](), list[DenseCopies](), list[int](), 0
        for group in self._groups:
            chunk = group[0]
            width = padded_width(self._steps[chunk].count)
            if chunk not in self._copied:
                calls.append(Call(tuple(group), width, self._first[chunk]))
                continue
            own = self._tokens_of(chunk)
            if waiting and rows + own > self._most_tokens:
                copies.append(self._dense(waiting))
                waiting, rows = [], 0
            waiting.append(chunk)
            where = slice(rows, rows + own)
            calls.append(Call((chunk,), width, self._first[chunk], len(copies), where))
            rows += own
        if waiting:
            copies.append(self._dense(waiting))
        return tuple(calls), tuple(copies)

    def _dense(self, chunks: Sequence[int]) -> DenseCopies:
        paged, copied, row = array("i"), array("i"), 0
        for chunk in chunks:
            locations, places = self._copied[chunk]
            count = len(locations) // PAGE_NUMBERS
            locations = locations[:]
            locations[2::PAGE_NUMBERS] = array(
                "i", range(row, row + PAGE_TOKENS * count, PAGE_TOKENS)
            )
            paged += locations
            row += PAGE_TOKENS * count
            copied += _pairs(places, range(row, row + len(places)))
            row += len(places)
        levels = tuple(sorted(set(paged[::PAGE_NUMBERS])))
        index = {level: number for number, level in enumerate(levels)}
        paged[::PAGE_NUMBERS] = array("i", map(index.__getitem__, paged[::PAGE_NUMBERS]))
        return DenseCopies(
            row,
            levels,
            to_mlx(paged).reshape(-1, PAGE_NUMBERS) if paged else None,
            to_mlx(copied).reshape(-1, 2),
        )

    def _rows(self, calls: Sequence[Call]) -> mx.array | None:
        found = array("i", [-1, 0]) * self._step.batch
        parts = [*self._step.parts()]
        joins, end = len(calls) > MOST_PARTS, 0
        for number, call in enumerate(calls):
            for index, chunk in enumerate(call.chunks):
                tokens, first = parts[chunk], index * call.width + end
                rows = range(first, first + tokens.stop - tokens.start)
                where = slice(2 * tokens.start, 2 * tokens.stop)
                found[where] = _pairs(repeat(0 if joins else number, len(rows)), rows)
            end += joins * len(call.chunks) * call.width
        if len(calls) == 1 and found == _pairs(repeat(0, self._end), range(self._end)):
            return None
        return to_mlx(found).reshape(-1, 2)


def _pairs(left: Iterable[int], right: Sequence[int]) -> array[int]:
    """Return pairs of numbers, one after the other. There is no loop over them, which is slow."""
    found = array("i", bytes(2 * len(right) * array("i").itemsize))
    found[::2], found[1::2] = array("i", left), array("i", right)
    return found


def _together(steps: Sequence[PrefillStep]) -> list[list[int]]:
    """Return the chunks of each call, by their numbers."""
    by_width = defaultdict[int, list[int]](list)
    for chunk, step in enumerate(steps):
        if not step.offset:
            by_width[padded_width(step.count)].append(chunk)
    # Whole groups: attention is planned for each number of chunks.
    groups = [
        chunks[first : first + TOGETHER]
        for chunks in by_width.values()
        for first in range(0, len(chunks) // TOGETHER * TOGETHER, TOGETHER)
    ]
    grouped = set(chain.from_iterable(groups))
    return groups + [[chunk] for chunk in range(len(steps)) if chunk not in grouped]
