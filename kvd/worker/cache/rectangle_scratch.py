"""Scratch for models that read keys and values as rectangles, and the batches that fit it."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.cache.rectangle import gathering_bytes
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.sequence import SequenceRow
from kvd.worker.cache.store import KVStore
from protocol.pages import TAIL_TOKENS


class RectangleScratch:
    """The stores that are read as rectangles: ``stores`` by their index in the model's cache."""

    def __init__(self, stores: dict[int, KVStore]) -> None:
        self.stores = stores

    def excess_bytes(self, length: int, chunk: int = 0) -> int:
        """Return by how many bytes a sequence's rectangle of one layer exceeds the scratch."""
        most = 0
        for store in self.stores.values():
            paged = PAGE_TOKENS * store.kind.max_pages(length, chunk)
            loose = TAIL_TOKENS + chunk
            nbytes = gathering_bytes(store.layers, paged, loose, paged + loose)
            most = max(most, nbytes - store.scratch.limit)
        return most

    def passes(self, sequences: Sequence[SequenceRow]) -> list[list[int]]:
        """Return which sequences decode in one pass, as lists of indices.

        One pass, unless the rectangles would exceed the scratch. Then sequences of similar length
        share a pass: they are sorted by length, and each pass is filled before the next one.
        """
        indices = list(range(len(sequences)))
        if not self.stores or self._fits(sequences):
            return [indices]
        groups: list[list[int]] = [[]]
        for index in sorted(indices, key=lambda index: sequences[index].length):
            group = [*groups[-1], index]
            if groups[-1] and not self._fits([sequences[member] for member in group]):
                group = [index]
                groups.append(group)
            groups[-1] = group
        return [sorted(group) for group in groups]

    def _fits(self, sequences: Sequence[SequenceRow]) -> bool:
        for number, store in self.stores.items():
            rows = [sequence.rows[number] for sequence in sequences]
            paged = [PAGE_TOKENS * (len(row.pages) + row.commits_next) for row in rows]
            most = max(
                tokens + row.tail_length + 1 for tokens, row in zip(paged, rows, strict=True)
            )
            loose = TAIL_TOKENS * len(rows)
            nbytes = gathering_bytes(store.layers, sum(paged), loose, len(rows) * most)
            if nbytes > store.scratch.limit:
                return False
        return True
