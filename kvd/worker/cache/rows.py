"""One request's place in the cache: integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    stand for, so attention sees the same before and after the flush.
    """

    slot: int
    """Place in the tail pools."""
    level: int = 0
    """Of the pages that it seals from now on; older ones may be on another."""
    length: int = 0
    pages: list[PageId] = field(default_factory=list)
    pending: int = 0
    """Pages that are quantized and await the next flush."""
    alive: bool = True

    @property
    def tail_length(self) -> int:
        """Tokens in the tail, quantized ones included."""
        return self.length - PAGE_TOKENS * len(self.pages)

    def check(self) -> None:
        """Assert that as much is quantized as the length asks for, no more and no less."""
        assert self.alive
        assert len(self.pages) + self.pending == full_pages(self.length), self
        assert self.tail_length >= 0, self
