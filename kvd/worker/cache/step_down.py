"""Stepping running rows down the ladder: fewer bits for pages that are there already.

Between two decode steps one `StepDown` works for a time slice, on rows whose pages may lie on
several levels. Its work comes in pieces: a few pages are converted, a few are moved together, or
keys or values of one layer's pool are copied into a smaller or larger one. Where the scratch has
no room for the new pages at once it goes in rounds, and each makes room for a larger next one::

    grow the lower pools -> convert pages, highest slots first -> pack the upper pools -> cut them

8-bit pages requantized to 4 bits have the error of direct 4-bit ones (measured: 0.0907 against
0.0906, relative, on normal data).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.store import SLICE_PAGES, KVStore

SCRATCH = 64 * 1024 * 1024


class StepDown:
    """Brings some rows to a lower level: what they have, and what they fill from now on.

    Pages that rows share are converted once, for all who hold them, frozen rows among them; these
    may also be stepped down themselves. Whatever goes wrong, every page is on one level or the
    other, never between. In the end the pools of all these levels
    are cut to what is used, also what flushes meanwhile made the lower ones grow ahead of need.

    ``scratch`` is how many bytes pools and copies may take beyond what the pools have now. A round
    is never smaller than one piece, and so goes beyond a scratch that is less than a copy of one
    side of a layer's pool.
    """

    def __init__(
        self, store: KVStore, rows: Iterable[Row], level: int, *, scratch: int = SCRATCH
    ) -> None:
        if level not in store.levels:
            raise ValueError(f"there is no level {level} on a ladder of {len(store.schemes)}")
        self._store = store
        self._level = level
        self._rows = list(rows)
        self._ceiling = store.pages_bytes + scratch
        self._target = store.allocators[level]
        self._goal = 0
        """Capacity that the lower pools are growing to."""
        self._loose: set[int] = set()
        """Levels whose pools are to be packed and cut: those that pages came from."""
        self._pace: float | None = None
        """Seconds a page, in the last piece that converted or moved some."""
        self._tight = False
        """Whether the lower pools are being cut, or have been."""
        for row in self._rows:
            if row.level < level:
                store.give_up_early(row)  # its tail has the tokens for one of the new level
                row.level = level

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self._tight and not self._due() and not self._loose

    def _due(self) -> list[PageId]:
        """Return the pages to convert, the one to take first last."""
        pages = {
            page
            for row in self._rows
            if row.alive
            for page in row.pages
            if page.level < self._level
        }
        # The ends of the upper pools fall free first, so that little must be moved to cut them.
        return sorted(pages, key=lambda page: (-page.level, page.slot))

    def advance(self, seconds: float, clock: Callable[[], float]) -> int:
        """Work for about ``seconds``, at least one piece; return how many pages it converted.

        The device must be idle. Raises what MLX raises when memory is short; nothing is lost then.
        """
        end = clock() + seconds
        due = self._due()
        left = len(due)
        while due or self._loose or self._to_tighten():
            self._piece(due, clock, end)
            if clock() >= end:
                break
        return left - len(due)

    def _to_tighten(self) -> bool:
        """Return whether all is converted and the lower pools' turn to be cut has come."""
        if self._tight:
            return False
        self._tight = True
        self._goal = 0
        self._loose.add(self._level)
        return True

    # The pieces. Each evaluates all that it does.

    def _piece(self, due: list[PageId], clock: Callable[[], float], end: float) -> None:
        if due and self._target.free:
            level = due[-1].level
            count = min(self._fitting(clock, end), self._target.free)
            pages = [page for page in due[-count:] if page.level == level]
            self._move(level, self._level, pages, clock)
            self._loose.add(level)
            del due[-len(pages) :]
        elif due and self._target.capacity < self._goal:
            self._grow()
        elif self._loose:
            self._give_back(min(self._loose), clock, end)
        else:
            self._plan(len(due))

    def _fitting(self, clock: Callable[[], float], end: float) -> int:
        """Return how many pages the rest of the time is good for, by the pace so far."""
        if self._pace is None:
            return 1
        if self._pace <= 0:
            return SLICE_PAGES
        return max(1, min(SLICE_PAGES, int((end - clock()) / self._pace)))

    def _move(
        self, source: int, target: int, pages: list[PageId], clock: Callable[[], float]
    ) -> None:
        start = clock()
        self._store.convert(source, target, pages)
        self._pace = (clock() - start) / len(pages)

    def _plan(self, due: int) -> None:
        """Decide how far the lower pools grow in this round."""
        store = self._store
        pools = [pool for layer in store.layers for pool in layer.pools]
        dense = max(pool.geometry.dense_bytes(PAGE_TOKENS) for pool in pools)
        # What a piece holds for a moment: a copy of one side, or pages packed, dense and packed.
        piece = max(3 * SLICE_PAGES * dense, *(max(pool.side_bytes) for pool in pools))
        room = self._ceiling - store.pages_bytes - piece
        pages = max(SLICE_PAGES, room // store.page_bytes(self._level))
        self._goal = self._target.capacity + min(due, pages)

    def _grow(self) -> None:
        for layer in self._store.layers:
            pool = layer.pools[self._level]
            for side, capacity in enumerate(pool.capacities):
                if capacity < self._goal:
                    pool.resize(side, self._goal)
                    return
        self._target.grow(self._goal)
        mx.clear_cache()  # the smaller copies are of no use to anybody

    def _give_back(self, level: int, clock: Callable[[], float], end: float) -> None:
        """Pack a level's pools, then cut them."""
        allocator = self._store.allocators[level]
        if moves := list(allocator.packing()):
            pages = [PageId(level, slot) for slot in moves[-self._fitting(clock, end) :]]
            self._move(level, level, pages, clock)
            return
        allocator.cut(allocator.used)
        for layer in self._store.layers:
            pool = layer.pools[level]
            for side, capacity in enumerate(pool.capacities):
                if capacity > allocator.capacity:
                    pool.resize(side, allocator.capacity)
                    return
        self._loose.remove(level)
        mx.clear_cache()  # and so the system has it back
