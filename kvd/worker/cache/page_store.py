"""The pages of all layers of one kind: allocation, byte counts, growth, and moves between levels.

Pools change size, and pages move, while the device is idle. If kernels write pages, a prefill pass
may still be in flight: it reads the old pools, behind which the copies are made. Pages move one
layer at a time; pools of small layers change size together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.page_tables import PageTables
from kvd.worker.cache.pages import PageAllocator, PageId
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import Row
from kvd.worker.cache.together import replace_all
from protocol.pages import SLAB_PAGES

NO_LIMIT = 1 << 62
"""Spare bytes of a cache without a limit."""
SLICE_PAGES = 16
"""Pages that are converted at once. The scratch holds dense copies of them, for one layer."""


def growth_pages(pages: int) -> int:
    """Return by how many pages pools with so many pages grow ahead of need."""
    return max(SLAB_PAGES, pages // 4)


class PageStore:
    """Allocators and pools of every level. ``holders`` returns all rows and snapshots."""

    def __init__(
        self,
        layers: list[LayerStore],
        levels: int,
        holders: Callable[[], list[Row]],
        tables: PageTables,
    ) -> None:
        self.levels = range(levels)
        self.allocators = [PageAllocator(level) for level in self.levels]
        self.spare: Callable[[], int] | None = None
        """Returns by how many bytes, as `charge` counts, pools may grow ahead of need. None: no
        limit."""
        self.reserved_bytes = 0
        """Bytes of ``spare`` that pools of other kinds need next."""
        self.reclaim: Callable[[], None] = self.cut_to_used
        """Called when pools must grow by more bytes than `spare` returns."""
        self.goals: dict[int, int] = {}
        """The capacity that a level's pools are growing to, by level (`pool_growth`)."""
        self._layers = layers
        self._holders = holders
        self._tables = tables

    # Byte counts.

    def page_bytes(self, level: int = 0) -> int:
        return self._page_bytes[level]

    # Cached, because every step reads them several times.

    @cached_property
    def _page_bytes(self) -> list[int]:
        return [sum(layers) for layers in self.layer_page_bytes]

    @cached_property
    def _charges(self) -> list[int]:
        return [sum(layers) + max(layers) for layers in self.layer_page_bytes]

    @cached_property
    def layer_page_bytes(self) -> list[tuple[int, ...]]:
        """Bytes of one page in each layer, by level."""
        return [
            tuple(layer.geometry.page_bytes(layer.pools[level].scheme) for layer in self._layers)
            for level in self.levels
        ]

    def charge(self, level: int = 0) -> int:
        """Return the bytes of a page and of its share of the copy that growing a pool takes."""
        return self._charges[level]

    @property
    def charged_bytes(self) -> int:
        return sum(
            self._charged_capacity(allocator) * self.charge(allocator.level)
            for allocator in self.allocators
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the pools. Exact even while one of them is being resized."""
        return sum(pool.nbytes for layer in self._layers for pool in layer.pools)

    @property
    def used_bytes(self) -> int:
        return sum(
            allocator.used * self.page_bytes(allocator.level) for allocator in self.allocators
        )

    @property
    def idle_charge(self) -> int:
        return sum(allocator.idle * self.charge(allocator.level) for allocator in self.allocators)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the pages that snapshots reference."""
        counts = ((len(one.snapshot_references), one.level) for one in self.allocators)
        return sum(count * self.page_bytes(level) for count, level in counts)

    # References.

    def retain(self, pages: Iterable[PageId], *, snapshot: bool = False) -> None:
        for page in pages:
            self.allocators[page.level].retain(page, snapshot=snapshot)

    def release(self, pages: Iterable[PageId], *, snapshot: bool = False) -> None:
        for page in pages:
            self.allocators[page.level].release(page, snapshot=snapshot)

    def release_written_ahead(self, row: Row) -> None:
        """Release the page that was written ahead of its commit. The tail still has its tokens."""
        self.release(row.written_ahead)
        row.written_ahead = []

    # Allocation and growth.

    def take(self, level: int, count: int) -> list[PageId]:
        """Take pages of a level, each with one reference. Grows its pools if they are too small."""
        allocator = self.allocators[level]
        if not allocator.can_take(count):
            self._grow(allocator, allocator.used + count)
        return allocator.take(count)

    def make_ready(
        self, wanted: Mapping[int, int], later: int = 0, *, reclaims: bool = True
    ) -> None:
        """Ensure that ``wanted`` pages of each level can be taken. Existing pages may move.

        ``later``: pages that will be wanted soon, if ``wanted`` has one level. Pools that must grow
        get room for them too, as far as memory is spare. ``reclaims``: whether growth ahead of
        need, for which admission reserves nothing, is undone if memory is not spare.
        """
        tight = self.missing_bytes(wanted) > self.spare_bytes()
        if tight and reclaims:
            self.reclaim()
        for level, count in wanted.items():
            allocator = self.allocators[level]
            if not allocator.can_take(count):
                self._grow(allocator, allocator.used + count, tight=tight, later=later)

    def has_room(self, wanted: Mapping[int, int]) -> bool:
        """Return whether ``wanted`` pages of each level can be taken without growth."""
        return all(self.allocators[level].can_take(count) for level, count in wanted.items())

    def missing_bytes(self, wanted: Mapping[int, int]) -> int:
        """Return by how many bytes pools must grow until these pages can be taken."""
        missing = 0
        for level, allocator in enumerate(self.allocators):
            more = allocator.used + wanted.get(level, 0) - self._charged_capacity(allocator)
            missing += max(0, more) * self.charge(level)
        return missing

    def spare_bytes(self) -> int:
        """Return by how many bytes pools may grow ahead of need."""
        return NO_LIMIT if self.spare is None else max(0, self.spare() - self.reserved_bytes)

    def _charged_capacity(self, allocator: PageAllocator) -> int:
        return max(allocator.capacity, self.goals.get(allocator.level, 0))

    def _grow(
        self, allocator: PageAllocator, needed: int, *, tight: bool = False, later: int = 0
    ) -> None:
        goal = self.goals.pop(allocator.level, 0)
        if later or not goal:
            taken = needed - allocator.used + later if later else 0
            goal = max(goal, self.capacity_ahead(allocator, taken))
        capacity = max(needed, goal)
        if tight:  # leave room for the next pool that must grow
            capacity = (needed + capacity) // 2
        self._grow_to(allocator, capacity)

    def _grow_to(self, allocator: PageAllocator, capacity: int) -> None:
        replace_all(new for pool in self._pools(allocator) for new in pool.grown(capacity))
        allocator.grow(capacity)  # last, so that every slot has storage even if a pool cannot grow

    def grow_piece(self, level: int, capacity: int) -> bool:
        """Grow the keys or values of one layer. Returns True once ``capacity`` is reached."""
        if (found := self.next_piece(level, capacity)) is None:
            return True
        pool, side = found
        pool.resize(side, capacity)
        return False

    def next_piece(self, level: int, capacity: int) -> tuple[PagePool, int] | None:
        """Return a pool that is too small, and its side; None: ``capacity`` is reached."""
        for layer in self._layers:
            pool = layer.pools[level]
            for side, current in enumerate(pool.capacities):
                if current < capacity:
                    return pool, side
        self.allocators[level].grow(capacity)
        return None

    def capacity_ahead(self, allocator: PageAllocator, taken: int = 0) -> int:
        """Return the capacity to grow to, as far as memory is spare.

        ``taken``: pages that are about to be taken at once. The pages of later flushes come on top:
        otherwise the next flush would lack room, and copy all pools again.
        """
        capacity = allocator.capacity
        wanted = max(capacity, allocator.used + taken) + growth_pages(capacity)
        return min(wanted, capacity + self.spare_bytes() // self.charge(allocator.level))

    # Moves.

    def convert(
        self, source: int, target: int, pages: list[PageId], rows: Iterable[Row] | None = None
    ) -> None:
        """Convert pages of one level to another, for ``rows`` or for all that reference the pages.

        The device must be idle. If this fails, rows and snapshots keep their pages.
        """
        new = self.take(target, len(pages))
        try:
            for layer in self._layers:
                layer.move(
                    source, target, [page.slot for page in pages], [page.slot for page in new]
                )
        except BaseException:
            self.release(new)
            raise
        self._replace(dict(zip(pages, new, strict=True)), self._holders() if rows is None else rows)

    def _replace(self, new: dict[PageId, PageId], rows: Iterable[Row]) -> None:
        for row in rows:
            for pages in (row.pages, row.written_ahead):
                for index, page in enumerate(pages):
                    if page in new:
                        pages[index] = new[page]
                        self.retain([new[page]], snapshot=row.is_snapshot)
                        self.release([page], snapshot=row.is_snapshot)
        self.release(new.values())  # the references from `take`
        self._tables.invalidate()

    # Giving memory back.

    def compact(self, pages: int = 0) -> int:
        """Pack the pages of every level and cut its pools. Returns the bytes freed.

        Level 0 keeps room for ``pages`` pages, or for fewer if lower levels have pages: their bytes
        are subtracted. The device must be idle.
        """
        before = self.nbytes
        self.goals.clear()
        lower = sum(
            allocator.used * self.charge(allocator.level) for allocator in self.allocators[1:]
        )
        pages -= -(-lower // self.charge())
        for allocator in self.allocators:
            kept = pages if allocator.level == 0 else 0
            self._cut(allocator, max(allocator.used, kept))
        return before - self.nbytes

    def cut_to_used(self) -> None:
        """Cut pools to the pages in use, except on levels that rows are being stepped down to."""
        targets = {
            row.level
            for row in self._holders()
            if any(page.level < row.level for page in row.pages)
        }
        for allocator in self.allocators:
            unused = self._charged_capacity(allocator) > allocator.used
            if unused and allocator.level not in targets:
                self.goals.pop(allocator.level, None)
                self._cut(allocator, allocator.used)

    def leave_room(self, pages: int) -> None:
        """Leave free places for at most ``pages`` pages on level 0, and for none on other levels.

        The device must be idle.
        """
        self.goals.clear()
        for allocator in self.allocators:
            room = pages if allocator.level == 0 else 0
            self._cut(allocator, allocator.used + room)

    def lacks_room(self, pages: int) -> bool:
        """Return whether level 0 should grow until it has free places for ``pages`` pages.

        Growth copies all pages. So pools stay as they are while enough pages are free: half of
        ``pages`` or of a slab, whichever is less, and at least a quarter of ``pages``.
        """
        return self.allocators[0].free < max(min(pages, SLAB_PAGES) // 2, pages // 4)

    def grow_towards(self, pages: int) -> None:
        """Grow a piece of level 0, the keys or values of one layer, if it `lacks_room`.

        Places for ``pages`` pages are free in the end. The device must be idle.
        """
        goal = self.goals[0] = max(self.goals.get(0, 0), self.allocators[0].used + pages)
        if self.grow_piece(0, goal):
            del self.goals[0]

    def _cut(self, allocator: PageAllocator, capacity: int) -> None:
        capacity = min(allocator.capacity, capacity)
        if capacity < allocator.capacity and (moves := allocator.packing()):
            self._move_within(allocator, moves)
        allocator.cut(capacity)
        replace_all(new for pool in self._pools(allocator) for new in pool.shortened(capacity))

    def _pools(self, allocator: PageAllocator) -> list[PagePool]:
        return [layer.pools[allocator.level] for layer in self._layers]

    def _move_within(self, allocator: PageAllocator, moves: dict[int, int]) -> None:
        level = allocator.level
        for layer in self._layers:
            layer.move(level, level, list(moves), list(moves.values()))
        allocator.moved(moves)
        moved = {PageId(level, old): PageId(level, new) for old, new in moves.items()}
        for row in self._holders():
            row.pages = [moved.get(page, page) for page in row.pages]
            row.written_ahead = [moved.get(page, page) for page in row.written_ahead]
        self._tables.invalidate()
