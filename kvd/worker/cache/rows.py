"""One sequence's place in the cache: integers, and the tail while it has no slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.recurrent_states import State
from kvd.worker.cache.scheme import PAGE_TOKENS
from protocol.pages import TAIL_TOKENS


@dataclass(eq=False)
class Row:
    """The keys and values of one sequence, ``length`` tokens long, in one store.

    ::

        tokens   0 ......... 64 * (len(pages) + skipped) ......... length
                 | quantized, in pages | exact, in the tail, 0 to 127 |

    The number of quantized tokens follows from the length alone (`full_pages`). It never depends on
    when a flush runs or on the rest of the batch. A flush writes the next page ahead of the commit;
    until the commit, attention reads the page's tokens from the tail. With a window, the pages
    between the first ``anchored`` ones and the newest ones are freed; ``skipped`` counts them.
    """

    is_snapshot: ClassVar[bool] = False
    """True for `kvd.worker.cache.row_snapshots.RowSnapshot`, which takes no more tokens."""
    slot: int
    """Place in the tail arrays; -1: the row has none yet (`is_placed`)."""
    level: int = 0
    """Precision level of the pages that the row fills next. Older pages may be on another level."""
    length: int = 0
    pages: list[PageId] = field(default_factory=list)
    written_ahead: list[PageId] = field(default_factory=list)
    """The next page, if a flush has already written it; else empty."""
    anchored: int = 0
    """Pages at the beginning that stay when others leave a window."""
    skipped: int = 0
    """Pages that left a window, after the anchored ones."""
    trimmed: bool = False
    """Whether tokens were removed (`KVStore.trim`). More tokens than `full_pages` says may then be
    quantized."""
    alive: bool = True
    tails: list[tuple[mx.array, mx.array]] = field(default_factory=list)
    """Keys and values of the tail in each layer, ``[heads, tail_length, dim]``, while the row has
    no slot. The arrays are never written to."""

    @property
    def is_placed(self) -> bool:
        """Whether the tail has a slot. A row without one takes part in no step."""
        return self.slot >= 0

    def copy_from(self, other: Row) -> None:
        """Take over another row's content, except its tail and the page written ahead."""
        self.level, self.length, self.pages = other.level, other.length, list(other.pages)
        self.anchored, self.skipped, self.trimmed = other.anchored, other.skipped, other.trimmed

    @property
    def tail_length(self) -> int:
        return self.length - self.tail_start

    @property
    def tail_start(self) -> int:
        return PAGE_TOKENS * self.paged

    @property
    def paged(self) -> int:
        """Pages committed so far, including those that left a window."""
        return len(self.pages) + self.skipped

    @property
    def held(self) -> list[PageId]:
        return self.pages + self.written_ahead

    @property
    def commits_next(self) -> bool:
        """Whether the next token commits the tail's oldest 64 tokens to a page."""
        return self.commits_within(1)

    def commits_within(self, steps: int) -> bool:
        """Whether one of the next ``steps`` tokens commits the tail's oldest 64 to a page."""
        return self.tail_length + steps >= TAIL_TOKENS

    @property
    def can_write_ahead(self) -> bool:
        """Whether a flush should write the next page."""
        # Not for a tail of exactly 64 tokens: between two chunks of a prompt every tail has 64, and
        # the next chunk writes that page itself.
        return self.is_placed and not self.written_ahead and self.tail_length > PAGE_TOKENS

    def commit_page(self) -> None:
        self.pages.append(self.written_ahead.pop())

    def start(self, index: int) -> int:
        """Return the position of the first token of the row's page ``index``."""
        return PAGE_TOKENS * (index if index < self.anchored else index + self.skipped)

    def index_of(self, number: int) -> int:
        """Return the index of the page with the tokens from position ``64 * number`` on."""
        return number if number < self.anchored else number - self.skipped

    def pages_before(self, position: int) -> int:
        """Return how many pages after the anchored ones end at or before ``position``."""
        count = position // PAGE_TOKENS - self.skipped - self.anchored
        return max(0, min(count, len(self.pages) - self.anchored))


@dataclass(eq=False)
class SequenceRow:
    """One sequence's rows, one in each store."""

    rows: list[Row]
    length: int = 0
    alive: bool = True
    state: State | None = None
    """Recurrent states while the sequence has no slots; None: it has (`is_placed`)."""

    @property
    def is_placed(self) -> bool:
        """Whether its tails and states have places, so that it can take part in steps."""
        return self.state is None
