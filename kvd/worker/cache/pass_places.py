"""Where the keys and values of a prefill pass come from and go to, computed once for all layers.

In each layer, the tokens of a pass follow the tails of those rows that have one, in one array::

    source    t t t . u u u u | a a a b b b b c c .      t, u: tails of two rows
              |<--- tails --->|<----- batch ----->|      a, b, c: chunks; .: unused

New pages and new tails are taken from it for all rows at once: on accelerators the host takes as
long to launch an operation for one row as for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Protocol, TypeVar

from kvd.worker.cache.packed import Slots, runs_of
from kvd.worker.cache.scheme import PAGE_TOKENS

_MOST_RUNS = 2
"""Most runs of tokens that are read by slices, see `Slots`."""


class Chunk(Protocol):
    """A chunk of a pass."""

    @property
    def continues(self) -> bool:
        """Whether the chunk before it is of the same row."""


C = TypeVar("C", bound=Chunk)


@dataclass(frozen=True)
class PlannedChunk:
    """What the places of a pass depend on; see `PrefillStep`."""

    slot: int
    level: int
    count: int
    tail_length: int
    new_pages: int
    continues: bool
    keeps_tail: bool


@dataclass(frozen=True)
class FilledPages:
    """Pages of one level that are quantized together."""

    level: int
    tokens: Slots
    """Places of their tokens."""


@dataclass(frozen=True)
class ChunkPlaces:
    """What a chunk attends to besides its row's pages: the tail before it, and itself."""

    tokens: tuple[slice, ...]
    earlier: tuple[int, ...]
    """Indices in `PassPlaces.pages`: what earlier chunks of the row in the same pass fill."""


@dataclass(frozen=True)
class TailPlaces:
    """Where new tails of the same length come from and go to."""

    slots: tuple[int, ...]
    tokens: Slots
    """Places of their tokens, tail by tail."""


@dataclass(frozen=True)
class KeptPlaces:
    """Where a pass finds the tails that it keeps (`PrefillStep.keeps_tail`)."""

    tokens: Slots
    """Places of their tokens, tail by tail."""
    spans: tuple[slice, ...]
    """One slice of these tokens for each tail."""

    @staticmethod
    def of(tails: Sequence[Sequence[int]]) -> KeptPlaces:
        return KeptPlaces(Slots([*chain.from_iterable(tails)], _MOST_RUNS), spans_of(tails))


@dataclass(frozen=True)
class PassPlaces:
    """Places in the source, and slots of tails; see the module."""

    tails: Slots
    """Slots of the tails that the source begins with."""
    tail_width: int
    """Tokens of each of these tails in the source: the longest one's, rounded up to whole pages."""
    pages: tuple[FilledPages, ...]
    """In the order of the chunks that fill them. Chunks that another one of their row follows have
    pages of their own."""
    chunks: tuple[ChunkPlaces, ...]
    new_tails: tuple[TailPlaces, ...]
    kept: KeptPlaces | None
    """None: no tail is kept."""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(steps: tuple[PlannedChunk, ...]) -> PassPlaces:
        """Return the places of a pass; ``steps``: its chunks, in the order of their tokens.

        Cached for mlx-lm's caches, of which each layer has steps of its own.
        """
        rows = by_row(steps)
        old = [first for first, *_ in rows if first.tail_length]
        width = _whole_pages(max((first.tail_length for first in old), default=0))
        pages, chunks, tails = _Pages(), list[ChunkPlaces](), dict[int, list[int]]()
        kept = list[list[int]]()
        tail, token = 0, width * len(old)
        for some in rows:
            length, count = some[0].tail_length, sum(step.count for step in some)
            places = [*range(tail, tail + length), *range(token, token + count)]
            tail, token = tail + width * bool(length), token + count
            earlier: list[int] = []
            for step in some:
                tokens = runs_of(places[: step.tail_length + step.count])
                chunks.append(ChunkPlaces(tuple(tokens), tuple(earlier)))
                full = step.new_pages * PAGE_TOKENS
                if full:
                    # A later chunk of the row sees these pages as they will be stored.
                    is_alone = step is not some[-1]
                    earlier.append(pages.add(step.level, places[:full], is_alone=is_alone))
                    places = places[full:]
                if step.keeps_tail:
                    kept.append(places[: step.tail_length + step.count - full])
            tails[some[0].slot] = places
        return PassPlaces(
            Slots([first.slot for first in old]),
            width,
            pages.groups(),
            tuple(chunks),
            _by_length(tails),
            KeptPlaces.of(kept) if kept else None,
        )


class _Pages:
    """Collects the pages of a pass in groups."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, bool, list[int]]] = []

    def add(self, level: int, places: list[int], *, is_alone: bool) -> int:
        """Add pages by the places of their tokens; return the number of their group.

        ``is_alone``: whether no other pages may be in it.
        """
        if not is_alone and self._groups and self._groups[-1][:2] == (level, False):
            self._groups[-1][2].extend(places)
        else:
            self._groups.append((level, is_alone, [*places]))
        return len(self._groups) - 1

    def groups(self) -> tuple[FilledPages, ...]:
        return tuple(
            FilledPages(level, Slots(places, _MOST_RUNS)) for level, _, places in self._groups
        )


def by_row(steps: Sequence[C]) -> list[list[C]]:
    """Return the chunks of each row."""
    rows: list[list[C]] = []
    for step in steps:
        if step.continues:
            rows[-1].append(step)
        else:
            rows.append([step])
    return rows


def spans_of(tails: Iterable[Sequence[int]], first: int = 0) -> tuple[slice, ...]:
    """Return one slice for each tail. They follow each other, from ``first`` on."""
    ends = accumulate(map(len, tails), initial=first)
    return tuple(slice(*span) for span in pairwise(ends))


def _whole_pages(tokens: int) -> int:
    return PAGE_TOKENS * -(-tokens // PAGE_TOKENS)


def _by_length(tails: dict[int, list[int]]) -> tuple[TailPlaces, ...]:
    """Return the tails, given by slot, in groups of the same length: padding would take memory."""
    found: list[TailPlaces] = []
    for length in dict.fromkeys(map(len, tails.values())):
        some = {slot: places for slot, places in tails.items() if len(places) == length}
        tokens = Slots([*chain.from_iterable(some.values())], _MOST_RUNS)
        found.append(TailPlaces(tuple(some), tokens))
    return tuple(found)
