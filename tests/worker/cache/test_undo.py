"""Failed steps: a prefill step is undone. After other failures all running rows are discarded."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.worker.cache.helpers import Bench, DenseRow
from tests.worker.cache.invariants import check_store

pytestmark = pytest.mark.mlx


def with_page_written_ahead(bench: Bench) -> DenseRow:
    row = bench.new(100)
    bench.decode([row])
    bench.drain()
    assert row.row.written_ahead
    return row


@pytest.mark.parametrize("layers_done", [1, 2])
def test_a_chunk_that_is_undone_leaves_no_trace(layers_done: int) -> None:
    bench = Bench()
    decoding = with_page_written_ahead(bench)
    reading = bench.new(256)
    decoding_too = with_page_written_ahead(bench)
    bench.store.begin_prefill(reading.row, 200)
    for cache in bench.caches[:layers_done]:
        shape = (1, bench.geometry.kv_heads, 200, 64)
        cache.update_and_fetch(mx.full(shape, 9.0), mx.full(shape, 9.0))

    assert bench.store.undo_prefill()
    assert not bench.store.undo_prefill()
    bench.drain()
    bench.check()
    bench.prefill(reading, 200)
    bench.decode([decoding, decoding_too, reading])
    bench.drain()
    bench.check()


def test_a_decode_step_cannot_be_undone() -> None:
    bench = Bench()
    bench.decode([bench.new(10)])

    assert not bench.store.undo_prefill()


def test_pages_of_a_failed_flush_are_discarded_and_snapshots_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    store = bench.store
    kept = bench.new(300)
    snapshot = store.snapshots.take(kept.row)
    before = [np.array(side) for side in store.read(kept.row, 1)]
    bench.decode([bench.new(100)])
    mx.eval(store.arrays())
    with monkeypatch.context() as patch:
        patch.setattr(store.layers[1], "put", None)
        with pytest.raises(TypeError):
            store.flush()
    store.discard()
    store.shrink()

    check_store(store)
    assert store.rows == []
    assert store.pages.allocators[0].used == store.pages.allocators[0].idle == len(snapshot.pages)
    restored = store.restore(snapshot)
    for side, wanted in zip(store.read(restored, 1), before, strict=True):
        np.testing.assert_array_equal(np.array(side), wanted)
    check_store(store)
