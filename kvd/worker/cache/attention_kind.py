"""Which earlier tokens a layer's queries see: full attention, sliding windows, chunks.

There is no circular buffer. Tokens keep their positions. Pages that no later query sees are freed,
and the unseen tokens of the oldest page are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from kvd.worker.cache.scheme import PAGE_TOKENS
from protocol import pages

Position = TypeVar("Position", int, mx.array)


@dataclass(frozen=True)
class Kind:
    """Which tokens the queries of some layers see. By default, all up to the query's own.

    ``window``: how many tokens a query sees, its own included: the first ``keep`` tokens of the
    sequence, and the newest ones (a sliding window, or `max_kv_size` with attention sinks, arXiv
    2309.17453). ``chunk``: tokens per attention chunk, on an absolute grid; a query sees only its
    own chunk (Llama 4).
    """

    window: int | None = None
    keep: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 0 <= self.keep < self.window:
            raise ValueError(f"a window of {self.window} tokens cannot keep {self.keep} of them")

    @property
    def bounded(self) -> bool:
        return self.window is not None or self.chunk is not None

    @property
    def name(self) -> str:
        if self.window is not None:
            return f"window {self.window}" + (f" keep {self.keep}" if self.keep else "")
        return "full" if self.chunk is None else f"chunk {self.chunk}"

    @property
    def anchored_pages(self) -> int:
        """Pages at the beginning that never leave the window."""
        return -(-self.keep // PAGE_TOKENS)

    def low(self, position: Position) -> Position:
        """Return the first position that a query at ``position`` sees, apart from the kept ones."""
        if self.window is not None:
            return position - (self.window - self.keep - 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return position - position

    def visible(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Return which keys each query sees, as bool. The arrays of positions are broadcast."""
        seen = keys <= queries
        if self.bounded:
            seen = seen & ((keys >= self.low(queries)) | (keys < self.keep))
        return seen

    def max_pages(self, length: int, chunk: int = 0) -> int:
        """Return the most pages that a row ever holds on its way to ``length`` tokens.

        ``chunk`` is the number of prompt tokens that are prefilled at once.
        """
        return pages.max_pages(
            length, window=self.window, keep=self.keep, chunk=self.chunk, step=chunk
        )


FULL = Kind()
