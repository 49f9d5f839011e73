"""Invariants of allocators, rows, stores and whole caches."""

from __future__ import annotations

import numpy as np

from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.page_tables import page_locations
from kvd.worker.cache.pages import PageAllocator, PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.cache.store import KVStore
from protocol.pages import TAIL_TOKENS


def check_allocator(allocator: PageAllocator) -> None:
    free, used = set(allocator._free), set(allocator.references)
    assert len(free) == len(allocator._free), "a slot is in the free list twice"
    assert not free & used, f"free and in use: {sorted(free & used)}"
    assert free | used == set(range(allocator.capacity)), "a slot is lost"
    assert all(count > 0 for count in allocator.references.values())
    snapshots = allocator.snapshot_references.items()
    assert all(0 < count <= allocator.references[slot] for slot, count in snapshots)
    idle = [slot for slot, count in snapshots if count == allocator.references[slot]]
    assert allocator.idle == len(idle), "idle pages are miscounted"


def check_row(row: Row) -> None:
    """Assert that a row has as many quantized pages as its length requires."""
    assert row.alive
    if row.trimmed:
        assert row.paged >= full_pages(row.length), row
    else:
        assert row.paged == full_pages(row.length), row
    assert not row.skipped or len(row.pages) >= row.anchored, row
    assert 0 <= row.tail_length < TAIL_TOKENS, row
    assert PAGE_TOKENS * len(row.written_ahead) <= min(row.tail_length, PAGE_TOKENS), row


def check_store(store: KVStore) -> None:
    """Assert that references, lengths and bytes agree with each other."""
    snapshots = store.snapshots.all
    held: dict[PageId, int] = {}
    for row in (*store.rows, *snapshots):
        check_row(row)
        for page in row.held:
            held[page] = held.get(page, 0) + 1
    only_snapshots = {page for row in snapshots for page in row.held}
    only_snapshots -= {page for row in store.rows for page in row.held}
    for allocator in store.pages.allocators:
        check_allocator(allocator)
        level = allocator.level
        mine = {page: count for page, count in held.items() if page.level == level}
        assert mine == {page: allocator.references.get(page.slot, 0) for page in mine}
        assert len(mine) == allocator.used, "a page in use is referenced by no row"
        assert allocator.idle == sum(page in mine for page in only_snapshots)
        pools = [layer.pools[level] for layer in store.layers]
        assert all(pool.capacity >= allocator.capacity for pool in pools), (
            "a pool has fewer slots than its allocator"
        )
    for row in snapshots:
        tails = [layer.geometry.dense_bytes(row.tail_length) for layer in store.layers]
        assert row.nbytes == sum(tails), "nbytes of a snapshot is not its tail's size"
    assert store.snapshots.nbytes == sum(row.nbytes for row in snapshots)
    assert store.nbytes == sum(layer.nbytes for layer in store.layers) + store.snapshots.nbytes
    for row, locations in store.tables._locations.items():
        assert np.array_equal(locations, page_locations(row)), "a table has stale pages"
    for row in store.rows:
        lengths = [keys.shape[1] for keys, _ in row.tails]
        assert lengths == ([] if row.is_placed else [row.tail_length] * len(store.layers))
    slots = [row.slot for row in store.rows if row.is_placed] + store.tails._free
    assert sorted(slots) == list(range(store.tails.count)), "a tail is lost or shared"


def check_cache(cache: ModelCache | MlxLmCache) -> None:
    """Assert the invariants of a cache's stores, sequences and snapshots."""
    assert all(sequence.alive for sequence in cache.sequences)
    assert all(snapshot.alive for snapshot in cache.snapshots.all)
    assert cache.snapshots.nbytes == sum(one.nbytes for one in cache.snapshots.all)
    if isinstance(cache, MlxLmCache):
        return
    for index, store in enumerate(cache.stores):
        check_store(store)
        assert store.snapshots.all == [snapshot.rows[index] for snapshot in cache.snapshots.all]
    for sequence in cache.sequences:
        assert all(row.length == sequence.length for row in sequence.rows)
        assert all(row.is_placed == sequence.is_placed for row in sequence.rows)
    for snapshot in cache.snapshots.all:
        assert all(row.alive and row.length == snapshot.length for row in snapshot.rows)
    snapshots = cache.snapshots.all
    for some in (snapshots, snapshots[1:], snapshots[:1]):
        held = sum(one.nbytes for one in some)
        for index, store in enumerate(cache.stores):
            pages = {page for one in some for page in one.rows[index].pages}
            held += sum(store.pages.page_bytes(page.level) for page in pages)
        assert cache.snapshots.held_bytes(some) == held
