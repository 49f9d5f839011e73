"""One request's place in the cache: integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages

TAIL_TOKENS = 2 * PAGE_TOKENS
"""Room in a tail: up to 127 exact tokens, and the one that turns 64 of them into a page."""


@dataclass(eq=False)
class Row:
    """The keys and values of one request, ``length`` tokens long.

    ::

        tokens   0 ......... 64 * (len(pages) + skipped) ......... length
                 | quantized, in pages | exact, in the tail, 0 to 127 |

    How much is quantized follows from the length alone (`full_pages`), never from when pools are
    written or who shares the batch. A page is written at some flush before its time comes: until
    then it is ``early``, nobody reads it, and its tokens are those of the tail. In a window, pages
    between the ``anchored`` first ones and the rest have fallen out: ``skipped`` of them.
    """

    is_snapshot: ClassVar[bool] = False
    """Whether it takes no more tokens (`kvd.worker.cache.snapshot`)."""
    slot: int
    """Place in the tail pools."""
    level: int = 0
    """Of the pages that it fills from now on; older ones may be on another."""
    length: int = 0
    pages: list[PageId] = field(default_factory=list)
    early: list[PageId] = field(default_factory=list)
    """The next page, if it is written already."""
    anchored: int = 0
    """Pages at the beginning that stay when others fall out of a window."""
    skipped: int = 0
    """Pages that fell out, behind the anchored ones."""
    trimmed: bool = False
    """Whether tokens were taken back: then more may be quantized than the length asks for."""
    alive: bool = True

    def become(self, other: Row) -> None:
        """Take over all that another row is, but for its slot and what is written early."""
        self.level, self.length, self.pages = other.level, other.length, list(other.pages)
        self.anchored, self.skipped, self.trimmed = other.anchored, other.skipped, other.trimmed

    @property
    def tail_length(self) -> int:
        """Tokens in the tail."""
        return self.length - self.tail_start

    @property
    def tail_start(self) -> int:
        """Position of the tail's first token."""
        return PAGE_TOKENS * self.paged

    @property
    def paged(self) -> int:
        """Pages that were ever read, those that fell out included."""
        return len(self.pages) + self.skipped

    @property
    def held(self) -> list[PageId]:
        """All pages that the row holds."""
        return self.pages + self.early

    @property
    def at_the_end(self) -> bool:
        """Whether the next token turns the tail's first 64 into a page."""
        return self.tail_length + 1 >= TAIL_TOKENS

    @property
    def wants_early(self) -> bool:
        """Whether its next page can be written: not at once when 64 tokens are there.

        Between the chunks of a prompt a tail has just so many, and needs none.
        """
        return not self.early and self.tail_length > PAGE_TOKENS

    def turn_page(self) -> None:
        """Read the page that was written early from now on."""
        self.pages.append(self.early.pop())

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
            assert self.paged >= full_pages(self.length), self
        else:
            assert self.paged == full_pages(self.length), self
        assert not self.skipped or len(self.pages) >= self.anchored, self
        assert 0 <= self.tail_length < TAIL_TOKENS, self
        assert PAGE_TOKENS * len(self.early) <= min(self.tail_length, PAGE_TOKENS), self
