"""The slots of the tail arrays: which are free, and which must be cleared before use.

A row has the same slot in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.rows import Row
from kvd.worker.cache.together import replace_all
from protocol.pages import TAIL_TOKENS


class TailSlots:
    """Tail slots of all layers. Lower slots are given out first."""

    def __init__(self, layers: list[LayerStore]) -> None:
        self.count = 0
        self._layers = layers
        self._free: list[int] = []
        self._dirty: set[int] = set()

    @property
    def row_bytes(self) -> int:
        return sum(layer.geometry.dense_bytes(TAIL_TOKENS) for layer in self._layers)

    @property
    def nbytes(self) -> int:
        return self.count * self.row_bytes

    def take(self, coming: int = 1) -> int:
        """Return a free slot.

        If there is none, the arrays grow by ``coming`` slots: each growth copies all tails.
        """
        if not self._free:
            self._resize(self.count + coming)
            self._free += range(self.count, self.count + coming)
            self.count += coming
        slot = self._free.pop(0)
        if slot in self._dirty:
            self._dirty.remove(slot)
            for layer in self._layers:
                layer.clear_tail(slot)
        return slot

    def free(self, slot: int, *, clean: bool) -> None:
        """Free a slot. Unless ``clean``, it is cleared before another row gets it."""
        if not clean:
            self._dirty.add(slot)
        self._free.append(slot)
        self._free.sort()

    def cut(self, rows: Sequence[Row]) -> bool:
        """Free the tails that no row uses. ``rows`` are all rows with slots, which may change.

        The device must be idle. Returns whether any tail was free.
        """
        if not self._free:
            return False
        free = iter(self._free)
        count = len(rows)
        for row in sorted(rows, key=lambda row: -row.slot):
            if row.slot >= count:
                target = next(free)
                for layer in self._layers:
                    layer.move_tail(row.slot, target)
                row.slot = target
        self._resize(count)
        self._free = []
        self._dirty = set()
        self.count = count
        return True

    def _resize(self, count: int) -> None:
        replace_all(new for layer in self._layers for new in layer.resized_tails(count))

    def clear(self) -> None:
        """Free all tails. No row may be left."""
        self.count = 0
        self._free = []
        self._dirty = set()
        for layer in self._layers:
            layer.drop_tails()
