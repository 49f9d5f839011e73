"""Which earlier tokens a layer's queries see: full attention, sliding windows, chunks.

Nothing rotates and nothing wraps around: a token keeps its position for good, pages that no later
query sees are freed, and what is left of the oldest one is masked.
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
    """What one sort of layer attends to, its own token included.

    ``window``: the newest so many tokens, of which the first ``keep`` of the whole sequence take
    ``keep`` places (a sliding window, or `max_kv_size` with attention sinks, arXiv 2309.17453);
    ``chunk``: the tokens of the query's own chunk, on an absolute grid (Llama 4).
    """

    window: int | None = None
    keep: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 0 <= self.keep < self.window:
            raise ValueError(f"a window of {self.window} tokens cannot keep {self.keep} of them")

    @property
    def bounded(self) -> bool:
        """Whether a row stops growing."""
        return self.window is not None or self.chunk is not None

    @property
    def name(self) -> str:
        """Such as ``window 1024``."""
        if self.window is not None:
            return f"window {self.window}" + (f" keep {self.keep}" if self.keep else "")
        return "full" if self.chunk is None else f"chunk {self.chunk}"

    @property
    def anchored_pages(self) -> int:
        """Pages at the beginning that never fall out."""
        return -(-self.keep // PAGE_TOKENS)

    def low(self, position: Position) -> Position:
        """Return the first position, beside the kept ones, that a query there sees."""
        if self.window is not None:
            return position - (self.window - self.keep - 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return position - position

    def visible(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Return who sees whom: positions ``[n]`` and ``[m]``, or any that broadcast; bool."""
        seen = keys <= queries
        if self.bounded:
            seen = seen & ((keys >= self.low(queries)) | (keys < self.keep))
        return seen

    def max_pages(self, length: int, chunk: int = 0) -> int:
        """Return the most pages that a row ever holds on its way to ``length`` tokens.

        Pages fall out once in 64 tokens, or behind ``chunk`` prefilled ones.
        """
        return pages.max_pages(
            length, window=self.window, keep=self.keep, chunk=self.chunk, step=chunk
        )


FULL = Kind()
"""Every earlier token."""
