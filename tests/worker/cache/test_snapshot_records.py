"""Snapshots written to records and read back continue bit for bit, for every kind of cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.snapshot_records import SnapshotReader, SnapshotWriter
from kvd.worker.cache.step_down import ModelStepDown
from kvd.worker.serving import probe
from kvd.worker.serving.runner import Row, Runner
from protocol.record_file import DamagedFile
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.cache.test_snapshot import SETTINGS, decode, disturb, ids, prefill

pytestmark = pytest.mark.mlx

KINDS = ["baichuan_m1", "qwen3_next"]
"""A model with windows, full attention and states, and one with gated delta nets."""


def alone(name: str, how: str = "plain") -> Runner:
    model, _ = build(name)
    return Runner(model, ModelCache(probe.find_layout(model), SETTINGS[how]))


def take(loader: SnapshotReader, between=lambda: None) -> None:
    """Read all records; call ``between`` after each."""
    for _ in loader.run():
        between()


def assert_both_continue(runner: Runner, rows: list[Row]) -> None:
    """Write two rows to records while pages move, read them back, and assert that both continue."""
    cache = runner.cache
    cache.flush()
    snapshot = [cache.snapshots.take(row) for row in rows]
    shared = {page for store in snapshot[0].rows for page in store.pages}
    more = ids(66, 8)
    wanted = [decode(runner, [row], more)[0] for row in rows]
    for row in rows:
        cache.free(row)
    saver = SnapshotWriter(cache, snapshot)
    stream = saver.records()
    records = [next(stream) for _ in range(3)]
    disturb(runner)  # moves pages that are not written yet
    records += stream
    content = sum(map(len, records[1:]))
    assert content == saver.nbytes
    for one in snapshot:
        cache.snapshots.drop(one)
    cache.shrink()
    assert cache.nbytes == 0

    loader = SnapshotReader(cache, iter(records))
    stranger = cache.new_row()
    prefill(runner, stranger, ids(130, 4))
    take(loader, lambda: check_cache(cache))
    cache.free(stranger)
    disturb(runner)
    assert len({page for store in loader.sequences[0].rows for page in store.pages}) == len(shared)
    for row, want in zip(loader.sequences, wanted, strict=True):
        np.testing.assert_array_equal(decode(runner, [row], more)[0], want)
        cache.free(row)
    cache.shrink()
    assert cache.nbytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_cache_is_read_back(name: str) -> None:
    runner = alone(name)
    row = runner.cache.new_row()
    prefill(runner, row, ids(150))
    runner.cache.flush()
    snapshot = runner.cache.snapshots.take(row)
    other = runner.cache.restore(snapshot)
    runner.cache.snapshots.drop(snapshot)
    decode(runner, [row], ids(37, 2))
    decode(runner, [other], ids(5, 3))
    assert_both_continue(runner, [row, other])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dense at first", "bounded"])
def test_every_setting_is_read_back(how: str) -> None:
    runner = alone("gpt_oss", how)
    rows = [runner.cache.new_row() for _ in range(2)]
    for seed, row in enumerate(rows):
        prefill(runner, row, ids(150 + 130 * seed, seed))
        decode(runner, [row], ids(30, 2))
    assert_both_continue(runner, rows)


@pytest.mark.parametrize("length", [199, 200])
def test_a_row_about_to_leave_the_dense_start_is_read_back(length: int) -> None:
    """Taking a snapshot quantizes the pages of a row that reached `quantized_start`.

    Otherwise a flush between records would convert pages whose content is not read yet.
    """
    runner = alone("qwen3", "dense at first")
    cache = runner.cache
    (start,) = {store.quantized_start for store in cache.stores}
    assert start == 200
    row = cache.new_row()
    prefill(runner, row, ids(150))
    decode(runner, [row], ids(length - 150, 2))
    snapshot = cache.snapshots.take(row)
    twin = cache.restore(snapshot)
    want = decode(runner, [twin], ids(10, 8))[0]
    records = list(SnapshotWriter(cache, [snapshot]).records())
    for one in (row, twin):
        cache.free(one)
    cache.snapshots.drop(snapshot)
    loader = SnapshotReader(cache, iter(records))
    stranger = cache.new_row()
    prefill(runner, stranger, ids(100, 5))
    take(loader, cache.flush)

    check_cache(cache)
    np.testing.assert_array_equal(decode(runner, loader.sequences, ids(10, 8))[0], want)


@pytest.mark.slow
def test_pages_are_read_back_on_their_levels() -> None:
    runner = alone("qwen3")
    row = runner.cache.new_row()
    prefill(runner, row, ids(256))
    lowering = ModelStepDown(runner.cache, [row], 1)
    while not lowering.over:
        lowering.advance(1.0, iter(range(1000)).__next__)
    other = runner.cache.new_row()
    prefill(runner, other, ids(256, 7))
    assert_both_continue(runner, [row, other])


def damaged(records: list[bytes]) -> Iterator[list[bytes]]:
    yield []
    yield records[:1]
    yield records[:-1]
    yield [b"{}", *records[1:]]
    yield [records[0], records[1][:-4], *records[2:]]
    yield [*records[:-1], records[-1] + b"1234"]


def test_incomplete_records_are_refused_and_leave_nothing() -> None:
    runner = alone("qwen3")
    cache = runner.cache
    row = cache.new_row()
    prefill(runner, row, ids(200))
    snapshot = cache.snapshots.take(row)
    records = list(SnapshotWriter(cache, [snapshot]).records())
    cache.free(row)
    cache.snapshots.drop(snapshot)
    for one in damaged(records):
        loader = SnapshotReader(cache, iter(one))
        with pytest.raises(DamagedFile):
            take(loader)
        loader.forget()
        check_cache(cache)
        assert cache.usage.pages_used == 0
    other = alone("gpt_oss").cache
    with pytest.raises(DamagedFile, match="another model"):
        take(SnapshotReader(other, iter(records)))
