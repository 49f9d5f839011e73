"""Divides a chunk of a prefill pass into the tiles that `kernels.attend` processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvd.worker.attention.kernels.attend import ENTRY_COLUMN
from kvd.worker.cache.scheme import PAGE_TOKENS


@dataclass(frozen=True)
class ChunkPlaces:
    """A chunk's tokens, and the keys that they see."""

    first: int
    """Index of its first token in the batch."""
    result: int
    """Index of that token in the result."""
    count: int
    before: int
    """Number of the batch's tokens before it that it sees; they are directly before it."""
    pages: int
    """Index of the first token of its row's pages in the copies."""
    page_tokens: int
    tail: int = 0
    """Index of the tail in the copies."""
    tail_tokens: int = 0
    entry: int = -1
    """Index of its first entry in the results of splits; -1: none."""

    def tiles(self, most: int, splits: int) -> Iterator[tuple[int, ...]]:
        """Yield tiles of at most ``most`` tokens, as in `kernels.arguments.Attend`.

        Each split has some of the pages, the last one also the tail and the tokens of the batch. A
        token's entries follow each other.
        """
        pages = self.page_tokens // PAGE_TOKENS
        for split in range(splits):
            last = split == splits - 1
            start = PAGE_TOKENS * (pages * split // splits)
            end = self.page_tokens if last else PAGE_TOKENS * (pages * (split + 1) // splits)
            some_pages = self.pages + start, end - start
            for token in range(0, self.count, most):
                some = min(most, self.count - token)
                where = self.first + token, self.result + token, some
                if last:
                    own = self.before + token + 1, self.first - self.before
                    keys = *own, *some_pages, self.tail, self.tail_tokens
                else:
                    keys = 1 - some, 0, *some_pages, 0, 0
                entry = -1 if self.entry < 0 else self.entry + token * splits + split
                yield *where, *keys, entry, splits


def empty_tiles(result: int, count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles without keys, whose results are zeros: for tokens from ``result`` on."""
    for token in range(0, count, most):
        some = min(most, count - token)
        yield 0, result + token, some, 1 - some, *[0] * (ENTRY_COLUMN - 4), -1, 1
