"""One request's place in the cache: integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages


@dataclass(eq=False)
class Row:
    """The keys and values of one request, ``length`` tokens long.

    ::

        tokens   0 ........ 64*len(pages) ..... 64*(len(pages)+pending) .......... length
                 | pages in the pools | quantized, awaits flush |  exact, 0 to 127  |
                                      |<-------- in the tail, tail_length ---------->|

    The quantized tokens that still await the flush are in the tail as the values that their pages
    stand for, so attention sees the same before and after the flush. In a window, pages between the
    ``anchored`` first ones and the rest have fallen out: ``skipped`` of them.
    """

    is_frozen: ClassVar[bool] = False
    """Whether it takes no more tokens (`kvd.worker.cache.frozen`)."""
    slot: int
    """Place in the tail pools."""
    level: int = 0
    """Of the pages that it seals from now on; older ones may be on another."""
    length: int = 0
    pages: list[PageId] = field(default_factory=list)
    pending: int = 0
    """Pages that are quantized and await the next flush."""
    anchored: int = 0
    """Pages at the beginning that stay when others fall out of a window."""
    skipped: int = 0
    """Pages that fell out, behind the anchored ones."""
    trimmed: bool = False
    """Whether tokens were taken back: then more may be quantized than the length asks for."""
    alive: bool = True

    def become(self, other: Row) -> None:
        """Take over all that another row is, but for its slot; it has nothing pending."""
        self.level, self.length, self.pages = other.level, other.length, list(other.pages)
        self.anchored, self.skipped, self.trimmed = other.anchored, other.skipped, other.trimmed

    @property
    def tail_length(self) -> int:
        """Tokens in the tail, quantized ones included."""
        return self.length - self.tail_start

    @property
    def tail_start(self) -> int:
        """Position of the tail's first token."""
        return PAGE_TOKENS * (len(self.pages) + self.skipped)

    @property
    def sealed(self) -> int:
        """Pages that were ever quantized, those that fell out included."""
        return len(self.pages) + self.skipped + self.pending

    def start(self, index: int) -> int:
        """Return the position of the first token of the row's page ``index``."""
        return PAGE_TOKENS * (index if index < self.anchored else index + self.skipped)

    def outdated(self, low: int) -> int:
        """Return how many pages, behind the anchored ones, lie before position ``low``."""
        gone = low // PAGE_TOKENS - self.skipped - self.anchored
        return max(0, min(gone, len(self.pages) - self.anchored))

    def check(self) -> None:
        """Assert that as much is quantized as the length asks for, no more and no less."""
        assert self.alive
        if self.trimmed:
            assert self.sealed >= full_pages(self.length), self
        else:
            assert self.sealed == full_pages(self.length), self
        assert not self.skipped or len(self.pages) >= self.anchored, self
        assert PAGE_TOKENS * self.pending <= self.tail_length, self
