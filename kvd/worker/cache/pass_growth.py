"""Growth of pools before a prefill pass whose pages kernels write.

Growth within the flush would wait for the pass. If pools grow before it, the host can prepare the
flush while the device computes. Growth may move the pages of all kinds, so it comes before any
kind's pass is planned. No kind grows ahead of need into memory that another one needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import full_pages
from kvd.worker.cache.store import KVStore


def grow_before(
    stores: Sequence[KVStore], rows: Sequence[Sequence[Row]], counts: Sequence[int], later: int
) -> None:
    """Ensure that the flush of a pass over chunks can take its pages.

    ``rows``: those of each store. ``later``: tokens that further passes will add to prompts on the
    level of these rows. If the model has one kind of attention, pools that must grow get room for
    them too. Waits for the device if pools must grow.
    """
    wanted = {
        store: _wanted(store, own, counts)
        for store, own in zip(stores, rows, strict=True)
        if store.is_flushed_by_kernel
    }
    if all(store.pages.has_room(pages) for store, pages in wanted.items()):
        return
    mx.synchronize()
    for store in wanted:
        store.scratch.clear()
        store.snapshots.forget_kept()
    if _missing(wanted) > next(iter(wanted)).pages.spare_bytes():
        stores[0].pages.reclaim()
    for store in list(wanted):
        pages = wanted.pop(store)
        one_pool = len(stores) == len(pages) == 1
        frees_pages = store.kind.bounded or store.quantized_start
        more = full_pages(later) if one_pool and not frees_pages else 0
        store.pages.reserved_bytes = _missing(wanted)
        try:
            store.pages.make_ready(pages, more, reclaims=False)
        finally:
            store.pages.reserved_bytes = 0


def _missing(wanted: dict[KVStore, Counter[int]]) -> int:
    return sum(store.pages.missing_bytes(pages) for store, pages in wanted.items())


def _wanted(store: KVStore, rows: Sequence[Row], counts: Sequence[int]) -> Counter[int]:
    """Return the pages that the flush of a pass takes, by level."""
    tokens = Counter[Row]()
    for row, count in zip(rows, counts, strict=True):
        tokens[row] += count
    wanted = Counter[int]()
    for row, count in tokens.items():
        # The pass releases a page that was written ahead.
        new = full_pages(row.length + count) - row.paged - len(row.written_ahead)
        wanted[row.level] += max(0, new)
    wanted.update(row.level for row in store.rows if row.can_write_ahead and row not in tokens)
    return wanted
