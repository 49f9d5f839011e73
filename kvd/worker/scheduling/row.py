"""One request as integers: its prompt, its place in the line, the memory that it may take.

Does not cover: who is next (`line`, `turns`), moves from state to state (`kvd.worker.scheduling.scheduler`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where a request stands among all others; the smaller one is first."""

    start: int
    """Tokens of work that had been submitted before it, less what its priority is worth."""
    number: int
    """Of its arrival: no two are equal."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions ``start`` to ``end`` (exclusive) of one row, to be prefilled."""

    rid: str
    start: int
    end: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start


@dataclass(eq=False, slots=True)
class Row:
    """A request in whatever state.

    While it is admitted it has ``choices`` places and `pages`; else it has the ``kept`` pages of a
    row that was parked in memory, and no place.
    """

    rid: str
    prompt_len: int
    max_new: int
    place: Place
    priority: int
    deadline: float | None
    """Absolute, of the caller's clock, in seconds."""
    choices: int
    """Completions that have not ended."""
    first_pages: int = 0
    """The most that one choice can fill, the prompt's among them."""
    more_pages: int = 0
    """The most that each further choice adds."""
    level: int = 0
    """Of the ladder, that it runs on or will start at; the pages are counted at it."""
    prefilled: int = 0
    """Prompt tokens that are in the cache."""
    started: bool = False
    """Whether it has ever been admitted: then the engine has something to restore."""
    paused: bool = False
    kept: int = 0
    """Pages that it holds while it is not admitted."""
    path: tuple[Hashable, ...] = ()
    """Names of its prompt's beginnings, by chunks (`scheduling.sharing`); empty: it shares none."""
    reads: bool = False
    """Whether its prompt has begun: it was looked up in the cache, or a chunk ran."""

    @property
    def prefill_end(self) -> int:
        """Where prefilling ends: the prompt's last token is the first decode input."""
        return self.prompt_len - 1

    @property
    def left(self) -> int:
        """Prompt tokens that are still to be prefilled."""
        return self.prefill_end - self.prefilled

    @property
    def pages(self) -> int:
        """Reserved while admitted: the worst case, so that no admitted row waits for memory.

        At its level; on the way down to one, at the level that it comes from.
        """
        return self.first_pages + (self.choices - 1) * self.more_pages
