"""Bytes that sequences take at most, by their lengths: admission reserves them."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.cache.rectangle import RectangleScratch
from kvd.worker.cache.recurrent_states import StateStore
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.store import KVStore
from protocol.pages import TAIL_TOKENS


class SequenceCosts:
    """Upper bounds for the sequences of one model. Pages count as `PageStore.charge`."""

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
        """Bytes of every sequence: its tails, and all copies of its states that steps keep."""
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
        """Return the most bytes of pages that another sequence uses which shares a beginning.

        It continues from a snapshot at ``start`` tokens up to ``length``. Quantized pages of the
        beginning stay shared, except in windows and where a dense start converts pages later.
        """
        shared = sum(
            full_pages(start) * store.pages.charge(self._settings.store_level(level))
            for store in self._stores
            if not (store.kind.bounded or store.quantized_start)
        )
        return self.pages_bytes(length, chunk, level) - shared

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a snapshot's tails and states, taken where prefill has reached a page's end."""
        return self._tail_bytes * PAGE_TOKENS // TAIL_TOKENS + self._states.row_bytes

    def checkpoint_charge(self, length: int) -> int:
        """Return the bytes that a checkpoint at ``length`` may hold beyond its sequence's own.

        Its tails and states, the pages that the sequence's windows will pass, and the dense pages
        that the sequence will replace.
        """
        leaving = sum(
            store.kind.max_pages(length) * store.pages.charge()
            for store in self._stores
            if store.kind.bounded or length <= store.quantized_start
        )
        return self.checkpoint_bytes + leaving
