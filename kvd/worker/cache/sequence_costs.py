"""The most bytes that sequences of given lengths take. Admission reserves these bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.cache.rectangle import RectangleScratch
from kvd.worker.cache.recurrent_states import StateStore
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.store import KVStore
from protocol.pages import TAIL_TOKENS


class SequenceCosts:
    """Upper bounds for the sequences of one model. A page counts as `PageStore.charge` bytes."""

    def __init__(
        self,
        settings: CacheSettings,
        stores: Sequence[KVStore],
        states: StateStore,
        rectangles: RectangleScratch,
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._states = states
        self._rectangles = rectangles
        self._tail_bytes = sum(store.tails.row_bytes for store in stores)
        self.row_bytes = self._tail_bytes + states.charged_row_bytes
        """Bytes that a sequence takes at any length: tails, and the copies of states in steps."""
        growing = next((store for store in stores if not store.kind.bounded), None)
        self.unit_bytes = growing.pages.charge() if growing else max(1, self.row_bytes)
        """Unit of reservations: a page of a kind that grows without bound, else `row_bytes`."""

    def pages_bytes(self, length: int, chunk: int = 0, level: int = 0) -> int:
        """Return the most bytes of pages that a sequence uses on its way to ``length`` tokens.

        Includes what its rectangle takes beyond the scratch. ``chunk`` is the number of tokens
        prefilled at once, ``level`` the precision level where the sequence starts.
        """
        start = self._settings.store_level(level)
        pages = sum(store.most_bytes(length, chunk, start) for store in self._stores)
        return pages + self._rectangles.excess_bytes(length, chunk)

    def continued_bytes(self, start: int, length: int, chunk: int = 0, level: int = 0) -> int:
        """Return the most bytes of pages that a sequence adds to those of a snapshot it continues.

        The snapshot has ``start`` tokens, and the sequence grows to ``length`` tokens. It shares
        the snapshot's pages, except in windows and where a dense start converts pages later.
        """
        shared = sum(
            full_pages(start) * store.pages.charge(self._settings.store_level(level))
            for store in self._stores
            if not (store.kind.bounded or store.quantized_start)
        )
        return self.pages_bytes(length, chunk, level) - shared

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of tails and states in a snapshot that is taken when prefill has filled a page.

        Every tail then has 64 tokens.
        """
        return self._tail_bytes * PAGE_TOKENS // TAIL_TOKENS + self._states.row_bytes

    def checkpoint_charge(self, length: int) -> int:
        """Return the most bytes that a checkpoint at ``length`` tokens adds to its sequence's.

        These are its tails and states, pages that will leave the sequence's windows, and dense
        pages that the sequence will replace by quantized ones.
        """
        leaving = sum(
            store.kind.max_pages(length) * store.pages.charge()
            for store in self._stores
            if store.kind.bounded or length <= store.quantized_start
        )
        return self.checkpoint_bytes + leaving
