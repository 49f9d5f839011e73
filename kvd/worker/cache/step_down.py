"""Stepping running rows down: existing pages are requantized to fewer bits.

A `StepDown` works for a short time between two decode steps. Its rows may have pages on several
levels. The work consists of pieces. A piece converts some pages, moves some pages to lower slots,
or copies the keys or values of one layer's pool into a smaller or larger array. If the scratch has
no room for all new pages at once, there are several rounds, and each makes room for a larger next
one::

    grow the target level's pools -> convert pages, highest slots first
        -> pack the remaining pages of the source levels -> cut the source levels' pools

8-bit pages requantized to 4 bits have the error of direct 4-bit pages (measured relative errors on
normally distributed data: 0.0907 and 0.0906).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.page_store import SLICE_PAGES
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row, SequenceRow
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.store import KVStore

SCRATCH = 64 * 1024 * 1024


class StepDown:
    """Moves rows to a lower precision level: their pages, and all pages that they fill later.

    Shared pages are converted once, for all rows and snapshots that reference them. The rows may be
    snapshots themselves. If a piece fails, every page is still on its old or its new level. At the
    end, the pools of all levels involved are cut to the pages in use.

    ``scratch`` is the number of bytes that pools and copies may take beyond the current pools. A
    single piece may exceed it.
    """

    def __init__(
        self, store: KVStore, rows: Iterable[Row], level: int, *, scratch: int = SCRATCH
    ) -> None:
        pages = store.pages
        if level not in pages.levels:
            raise ValueError(f"there is no level {level}: the store has {len(store.schemes)}")
        self._store = store
        self._level = level
        self._rows = list(rows)
        self._ceiling = pages.nbytes + scratch
        self._target = pages.allocators[level]
        self._goal = 0
        """Capacity that the target level's pools are growing to."""
        self._loose: set[int] = set()
        """Levels whose pools are to be packed and cut: those that pages came from, at the end also
        the target level."""
        self._pace: float | None = None
        """Seconds per page, in the last piece that converted or moved pages."""
        self._tight = False
        """Whether cutting the target level's pools has begun."""
        for row in self._rows:
            if row.level < level:
                pages.release_written_ahead(row)  # written again, on the new level
                row.level = level

    @property
    def over(self) -> bool:
        return self._tight and not self._due() and not self._loose

    def _due(self) -> list[PageId]:
        """Return the pages to convert, last first."""
        pages = {
            page
            for row in self._rows
            if row.alive
            for page in row.pages
            if page.level < self._level
        }
        # Highest slots are converted first, so that few pages must move before the pools are cut.
        return sorted(pages, key=lambda page: (-page.level, page.slot))

    def advance(self, seconds: float, clock: Callable[[], float]) -> int:
        """Work for about ``seconds``, at least one piece. Returns how many pages it converted.

        The device must be idle. Raises MLX's errors when memory is short; nothing is lost then.
        """
        end = clock() + seconds
        due = self._due()
        left = len(due)
        while due or self._loose or self._starts_cutting_target():
            self._piece(due, clock, end)
            if clock() >= end:
                break
        return left - len(due)

    def _starts_cutting_target(self) -> bool:
        """Add the target level to the levels to cut. Returns False if that was done before.

        Called when every page is converted.
        """
        if self._tight:
            return False
        self._tight = True
        self._goal = 0
        self._loose.add(self._level)
        return True

    # The pieces. Each evaluates everything that it does.

    def _piece(self, due: list[PageId], clock: Callable[[], float], end: float) -> None:
        if due and self._target.free:
            level = due[-1].level
            count = min(self._fitting(clock, end), self._target.free)
            pages = [page for page in due[-count:] if page.level == level]
            self._move(level, self._level, pages, clock)
            self._loose.add(level)
            del due[-len(pages) :]
        elif due and self._target.capacity < self._goal:
            if self._store.pages.grow_piece(self._level, self._goal):
                mx.clear_cache()  # the old arrays, now freed, are too small to be reused
        elif self._loose:
            self._give_back(min(self._loose), clock, end)
        else:
            self._plan(len(due))

    def _fitting(self, clock: Callable[[], float], end: float) -> int:
        """Return how many pages fit into the rest of the time, at the pace of the last piece."""
        if self._pace is None:
            return 1
        if self._pace <= 0:
            return SLICE_PAGES
        return max(1, min(SLICE_PAGES, int((end - clock()) / self._pace)))

    def _move(
        self, source: int, target: int, pages: list[PageId], clock: Callable[[], float]
    ) -> None:
        start = clock()
        self._store.pages.convert(source, target, pages)
        self._pace = (clock() - start) / len(pages)

    def _plan(self, due: int) -> None:
        """Decide how far the target level's pools grow in this round."""
        store = self._store
        pools = [pool for layer in store.layers for pool in layer.pools]
        dense = max(pool.geometry.dense_bytes(PAGE_TOKENS) for pool in pools)
        # A piece's temporary bytes: a copy of keys or values, or pages packed, dense, and packed
        # again.
        piece = max(3 * SLICE_PAGES * dense, *(max(pool.side_bytes) for pool in pools))
        room = self._ceiling - store.pages.nbytes - piece
        pages = max(SLICE_PAGES, room // store.pages.page_bytes(self._level))
        self._goal = self._target.capacity + min(due, pages)

    def _give_back(self, level: int, clock: Callable[[], float], end: float) -> None:
        allocator = self._store.pages.allocators[level]
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
        mx.clear_cache()  # return the memory to the system


class _InSlices:
    """Runs several `StepDown`, one after the other."""

    def __init__(self, steps: Iterable[StepDown]) -> None:
        self.pages = 0
        self._steps = list(steps)

    @property
    def over(self) -> bool:
        return all(step.over for step in self._steps)

    def advance(self, seconds: float, clock: Callable[[], float]) -> None:
        """Work for about ``seconds`` (`StepDown.advance`). The device must be idle."""
        end = clock() + seconds
        for step in self._steps:
            if step.over:
                continue
            self.pages += step.advance(end - clock(), clock)
            if clock() >= end:
                return


class ModelStepDown(_InSlices):
    """Steps sequences down to a precision level, one attention kind after the other."""

    def __init__(self, cache: ModelCache, sequences: Iterable[SequenceRow], level: int) -> None:
        self.level = level
        stepped = list(sequences)
        dense_levels = len(cache.settings.store_schemes) - len(cache.settings.schemes)
        super().__init__(
            StepDown(
                store,
                [sequence.rows[index] for sequence in stepped],
                level + dense_levels,
                scratch=cache.settings.step_down_scratch,
            )
            for index, store in enumerate(cache.stores)
        )


class PoolTrimming(_InSlices):
    """Cuts all pools to the pages in use, level by level."""

    def __init__(self, cache: ModelCache) -> None:
        for store in cache.stores:
            store.pages.goals.clear()
        super().__init__(
            StepDown(store, [], level, scratch=cache.settings.step_down_scratch)
            for store in cache.stores
            for level in store.pages.levels
        )
