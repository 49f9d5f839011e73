"""The dense start: rows begin without quantization, on level 0, until they have a given length."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.cache.page_store import SLICE_PAGES, PageStore
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row


class DenseStart:
    """Moves rows from level 0 to level 1 when they reach ``quantized_start`` tokens; 0: never."""

    def __init__(self, quantized_start: int, pages: PageStore) -> None:
        self._quantized_start = quantized_start
        self._pages = pages

    @property
    def is_used(self) -> bool:
        """Whether rows begin without quantization."""
        return self._quantized_start > 0

    def level(self, length: int) -> int:
        """Return the level of a row of this length that was never stepped down."""
        return 1 if 0 < self._quantized_start <= length else 0

    def outgrown(self, row: Row) -> bool:
        """Return whether a row must move from level 0 to level 1 before its next step."""
        return row.level < self.level(row.length)

    def unlowered(self, row: Row) -> bool:
        """Return whether a row and all its pages are on the level that its length calls for."""
        level = self.level(row.length)
        return row.level == level and all(page.level == level for page in row.pages)

    def leave(self, rows: list[Row]) -> None:
        """Move rows to level 1 and quantize their pages.

        A row that is not in ``rows`` and shares a page keeps the dense page.
        """
        if not rows:
            return
        self._pages.make_ready({1: len(_dense_pages(rows))})
        due = _dense_pages(rows)  # read again: making room may have moved pages
        for row in rows:
            row.level = 1
            if row.written_ahead and row.written_ahead[0].level == 0:
                self._pages.release_written_ahead(row)
        for start in range(0, len(due), SLICE_PAGES):
            self._pages.convert(0, 1, due[start : start + SLICE_PAGES], rows)


def _dense_pages(rows: Iterable[Row]) -> list[PageId]:
    return list(dict.fromkeys(page for row in rows for page in row.pages if page.level == 0))
