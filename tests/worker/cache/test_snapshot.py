"""Snapshots of small models of real architectures: restored sequences continue bit for bit."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache import row_snapshots
from kvd.worker.cache.layout import Access
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.step_down import ModelStepDown
from kvd.worker.serving import probe
from kvd.worker.serving.runner import Row, Runner
from tests.breadth import ALL
from tests.worker.architectures.reference import TOKENS
from tests.worker.architectures.zoo import build
from tests.worker.cache.helpers import Bench
from tests.worker.cache.invariants import check_cache, check_store

pytestmark = pytest.mark.mlx

CHUNK = 64
MODELS = {
    "qwen3": "full attention",
    "gpt_oss": "windows and sinks",
    "gemma3n": "layers that share keys and values",
    "baichuan_m1": "windows, full attention and states",
    "qwen3_next": "gated delta nets",
    "longcat_flash_ngram": "rectangles, and states of token ids",
    "mamba2": "states alone",
    "llama4": "chunks, one row a pass",
    "deepseek_v41": "mlx-lm's own caches",
}
SETTINGS = {
    "plain": CacheSettings(schemes=(Scheme(8, 4), Scheme(4, 4)), scratch=1 << 26),
    "dense at first": CacheSettings(schemes=(Scheme(4, 4),), quantized_start=200, scratch=1 << 26),
    "bounded": CacheSettings(schemes=(Scheme(4, 4),), max_size=200, keep=70, scratch=1 << 26),
}


def ids(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS, length)]


def prefill(runner: Runner, row: Row, tokens: list[int]) -> None:
    for start in range(0, len(tokens), CHUNK):
        runner.prefill(row, tokens[start : start + CHUNK])


def decode(runner: Runner, rows: list[Row], tokens: list[int]) -> list[np.ndarray]:
    """Feed all rows the same tokens. Returns the logits of each, ``[tokens, vocab]``."""
    found = []
    for token in tokens:
        if runner.cache.needs_flush(rows):
            runner.cache.flush()
        logits = runner.decode(rows, mx.array([token] * len(rows), mx.int32)).astype(mx.float32)
        mx.eval(logits, runner.cache.arrays())
        assert mx.isfinite(logits).all().item()
        found.append(np.array(logits))
    return list(np.stack(found, axis=1))


def disturb(runner: Runner) -> None:
    """Run sequences that overwrite free pages and leave NaN in tails, then move pages."""
    cache = runner.cache
    for seed in (5, 6):
        other = cache.new_row()
        prefill(runner, other, ids(200, seed))
        decode(runner, [other], ids(3, seed))
        if isinstance(cache, ModelCache):
            for store, row in zip(cache.stores, other.rows, strict=True):
                for layer in store.layers:
                    layer.tail_values[row.slot] = mx.nan
        cache.free(other, clean=False)
    cache.flush()
    cache.compact()
    check_cache(cache)


def together(runner: Runner) -> bool:
    """Return whether rows compute the same bits in a shared pass as alone: over pages only."""
    cache = runner.cache
    paged = isinstance(cache, ModelCache) and cache.batched and bool(cache.stores)
    return paged and all(access is Access.PAGES for access in cache.access.values())


def assert_continues(runner: Runner, prompt: int, decoded: int) -> None:
    """Assert that a snapshot restored later continues like the original.

    The snapshot is taken after ``prompt`` prefilled and ``decoded`` decoded tokens.
    """
    cache = runner.cache
    below = cache.new_row()
    prefill(runner, below, ids(200, 9))
    row = cache.new_row()
    prefill(runner, row, ids(prompt))
    if decoded:
        decode(runner, [row], ids(decoded, 2))
    cache.flush()
    snapshot = cache.snapshots.take(row)
    check_cache(cache)
    chunk, more = ids(100, 3), ids(34, 4)  # the row commits a page meanwhile
    prefill(runner, row, chunk)
    (want,) = decode(runner, [row], more)
    cache.free(row)
    cache.free(below)  # so that compacting moves the snapshot's pages
    disturb(runner)
    twins = [cache.restore(snapshot) for _ in range(2)]
    for twin in twins:
        prefill(runner, twin, chunk)
    if together(runner):
        got = decode(runner, twins, more)
    else:
        got = [decode(runner, [twin], more)[0] for twin in twins]
    for one in got:
        np.testing.assert_array_equal(one, want)
    for twin in twins:
        cache.free(twin)
    check_cache(cache)
    assert cache.snapshots.nbytes == snapshot.nbytes > 0
    assert cache.snapshots.freed_bytes([snapshot]) == cache.snapshots.held_bytes([snapshot])
    assert (
        cache.snapshot_charge
        == cache.snapshots.charge_of(snapshot)
        >= cache.snapshots.held_bytes([snapshot])
    )
    cache.snapshots.drop(snapshot)
    cache.shrink()
    assert cache.nbytes == cache.snapshot_charge == 0
    with pytest.raises(ValueError, match="dropped"):
        cache.restore(snapshot)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest) -> tuple[str, Any, Runner]:
    model, _ = build(request.param)
    return request.param, model, probe.serve(model, SETTINGS["plain"], TOKENS).runner


@pytest.mark.slow
def test_every_kind_of_cache_continues_bit_for_bit(served: tuple[str, Any, Runner]) -> None:
    name, _, runner = served
    assert isinstance(runner.cache, MlxLmCache) == ("own caches" in MODELS[name])
    lengths = [(256, 0), (150, 37)]
    for prompt, decoded in lengths if ALL else [lengths[[*MODELS].index(name) % 2]]:
        assert_continues(runner, prompt, decoded)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dense at first", "bounded"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_every_setting_continues_bit_for_bit(name: str, how: str) -> None:
    model, _ = build(name)
    cache = ModelCache(probe.find_layout(model), SETTINGS[how])
    for prompt, decoded in ((128, 3), (448, 0)):
        assert_continues(Runner(model, cache), prompt, decoded)


@pytest.mark.parametrize("how", ["plain", "dense at first", "bounded"])
def test_a_row_that_grew_is_taken_as_it_was(how: str) -> None:
    """It continues to the bit as if it had been taken then, wherever that is possible."""
    model, _ = build("qwen3")
    runner = Runner(model, ModelCache(probe.find_layout(model), SETTINGS[how]))
    cache, tokens = runner.cache, ids(330)
    row = cache.new_row()
    earlier = {0: cache.snapshots.take(row)}
    ends = [64, 128, 150, 192, 199, 200, 204, 250, 256, 258, 300, 320]
    cut = set()
    for start, end in pairwise([0, *ends]):
        runner.prefill(row, tokens[start:end])
        for at, snapshot in earlier.items():
            if not cache.snapshots.can_cut(end, at):
                with pytest.raises(ValueError, match=f"of {end} tokens cannot be cut to {at}"):
                    cache.snapshots.take(row, at)
                continue
            cut.add((at, end))
            late = cache.snapshots.take(row, at)
            rows = [cache.restore(one) for one in (snapshot, late)]
            for one in rows:
                runner.prefill(one, tokens[at : at + 10])
            want, got = decode(runner, rows, ids(3, 2))
            np.testing.assert_array_equal(got, want)
            for one in rows:
                cache.free(one)
            cache.snapshots.drop(late)
        earlier[end] = cache.snapshots.take(row)
    assert {(204, 250)} <= cut
    pages = {at: [(len(one.pages), one.skipped) for one in was.rows] for at, was in earlier.items()}
    for at, end in combinations([0, *ends], 2):
        same = pages[at] == pages[end] and (how != "dense at first" or (at < 200) == (end < 200))
        # With a window, some pages count as dropped that stay because they are anchored.
        assert same if (at, end) in cut else not same or how == "bounded", (at, end)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_row_is_taken_at_the_chunk_ends_inside_its_pass(
    monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool
) -> None:
    """The pass keeps the tails there, and drops those of the pass before."""
    monkeypatch.setattr(row_snapshots, "on_cpu", lambda: on_cpu)
    model, _ = build("qwen3")
    runner = Runner(model, ModelCache(probe.find_layout(model), SETTINGS["plain"]))
    runner.packs = True
    cache, chunk = runner.cache, 256
    assert cache.snapshots.keeps_tails(chunk)
    tokens, other = ids(4 * chunk), ids(3 * chunk, 3)
    alone = []
    for some, ends in ((tokens, (0, 256, 512, 768, 900)), (other, (0, 300, 556, 560))):
        row, snapshots = cache.new_row(), dict[int, Any]()
        for start, end in pairwise(ends):
            runner.prefill(row, some[start:end])
            snapshots[end] = cache.snapshots.take(row)
        cache.free(row)
        alone.append(snapshots)

    first, second = cache.new_row(), cache.new_row()
    runner.prefill(second, other[:300])
    spans = (0, 256), (256, 512), (512, 768), (768, 900)
    gone = cache.new_row()
    runner.prefill_pass([gone] * 2, [tokens[:256], tokens[256:300]])
    assert cache.snapshots.can_take(gone, 256)
    cache.free(gone)
    assert not cache.snapshots.can_take(gone, 256)
    runner.prefill_pass(
        [first] * 4 + [second] * 2,
        [*(tokens[start:end] for start, end in spans), other[300:556], other[556:560]],
    )
    kept = [(first, at) for at in (256, 512, 768, 900)] + [(second, at) for at in (556, 560)]
    taken = [cache.snapshots.take(row, at) for row, at in kept]
    for (row, at), snapshot in zip(kept, taken, strict=True):
        assert snapshot.length == at
        assert [len(one.pages) for one in snapshot.rows] == [at // 64 - 1]
        some, snapshots = (tokens, alone[0]) if row is first else (other, alone[1])
        rows = [cache.restore(one) for one in (snapshots[at], snapshot)]
        for one in rows:
            runner.prefill(one, some[at : at + 70])
        want, got = decode(runner, rows, ids(3, 2))
        assert np.isfinite(want).all()
        # Products of more tokens round differently. To read the page of a tail would differ more.
        np.testing.assert_allclose(got, want, atol=1e-2 if mx.cuda.is_available() else 1e-5)
        for one in rows:
            cache.free(one)
        check_cache(cache)
        cache.snapshots.drop(snapshot)
    assert not cache.snapshots.can_take(first, 256)  # another pass has begun
    with pytest.raises(ValueError, match="of 900 tokens cannot be cut to 256"):
        cache.snapshots.take(first, 256)
    assert {layer.kept for store in cache.stores for layer in store.layers} == {None}
    cache.snapshots.evaluate()
    assert not any(store.snapshots._lazy for store in cache.stores)


@pytest.mark.parametrize("how", ["dense at first", "bounded"])
def test_passes_that_free_or_move_pages_keep_no_tails(how: str) -> None:
    model, _ = build("qwen3")
    runner = Runner(model, ModelCache(probe.find_layout(model), SETTINGS[how]))
    runner.packs = True
    row = runner.cache.new_row()
    runner.prefill_pass([row] * 2, [ids(256), ids(256, 2)])
    assert not runner.cache.snapshots.keeps_tails(256)
    assert not runner.cache.snapshots.can_take(row, 256)
    assert runner.cache.snapshots.can_take(row, 512)


def test_a_row_leaves_the_dense_start_without_the_rows_that_share_its_pages() -> None:
    """Each row that shares dense pages quantizes them when its own length requires it."""
    model, _ = build("qwen3")

    def runner() -> Runner:
        return Runner(model, ModelCache(probe.find_layout(model), SETTINGS["dense at first"]))

    alone = runner()
    row = alone.cache.new_row()
    prefill(alone, row, ids(128))
    (want,) = decode(alone, [row], ids(20, 2))

    shared = runner()
    cache = shared.cache
    first = cache.new_row()
    prefill(shared, first, ids(128))
    snapshot = cache.snapshots.take(first)
    late = cache.restore(snapshot)
    prefill(shared, first, ids(128, 3))  # long enough to be quantized
    assert {page.level for page in first.rows[0].pages} == {1}
    assert {page.level for page in [*late.rows[0].pages, *snapshot.rows[0].pages]} == {0}
    assert cache.snapshots.unlowered(snapshot)
    (got,) = decode(shared, [late], ids(20, 2))

    np.testing.assert_array_equal(got, want)
    check_cache(cache)


def test_a_step_down_converts_the_pages_of_snapshots() -> None:
    model, _ = build("gpt_oss")
    cache = ModelCache(probe.find_layout(model), SETTINGS["plain"])
    runner = Runner(model, cache)
    row = cache.new_row()
    prefill(runner, row, ids(256))
    snapshot, before = cache.snapshots.take(row), cache.usage.used_bytes
    lowering = ModelStepDown(cache, [row], 1)
    while not lowering.over:
        lowering.advance(0.01, lambda: 0.0)
    check_cache(cache)

    assert cache.usage.used_bytes < before
    assert not cache.snapshots.unlowered(snapshot)
    assert [one.pages for one in snapshot.rows] == [one.pages for one in row.rows]
    cache.free(row)
    assert cache.usage.used_bytes > 0
    cache.snapshots.drop(snapshot)
    assert cache.usage.used_bytes == 0


def test_a_preempted_sequence_can_be_stepped_down() -> None:
    model, _ = build("qwen3")
    cache = ModelCache(probe.find_layout(model), SETTINGS["plain"])
    runner = Runner(model, cache)
    row = cache.new_row()
    prefill(runner, row, ids(256))
    snapshot = cache.snapshots.take(row)
    cache.free(row)
    lowering = ModelStepDown(cache, [snapshot], 1)
    while not lowering.over:
        lowering.advance(0.01, lambda: 0.0)
    again = cache.restore(snapshot)

    assert {page.level for page in again.rows[0].pages} == {again.rows[0].level} == {1}
    assert np.isfinite(decode(runner, [again], [1])[0]).all()
    check_cache(cache)


def test_only_tails_are_copied() -> None:
    bench = Bench(layers=2)
    row = bench.new(200).row
    snapshot = bench.store.snapshots.take(row)
    per_token = sum(layer.geometry.dense_bytes(1) for layer in bench.store.layers)

    assert snapshot.nbytes == (200 - 128) * per_token
    assert [keys.shape for keys, _ in snapshot.tails] == [(2, 72, 64)] * 2
    assert bench.store.pages.idle_charge == 0
    bench.free(bench.rows[0])
    assert bench.store.pages.idle_charge == 2 * bench.store.pages.charge()
    bench.store.snapshots.drop(snapshot)
    assert bench.store.pages.idle_charge == bench.store.pages.used_bytes == 0


def test_a_snapshot_has_no_page_written_ahead() -> None:
    bench = Bench(layers=1)
    row = bench.new(100)
    bench.drain()
    assert row.row.written_ahead
    snapshot = bench.store.snapshots.take(row.row)

    assert snapshot.held == []
    assert snapshot.tail_length == 100
    check_store(bench.store)


def test_a_snapshot_is_dropped_once() -> None:
    bench = Bench(layers=1)
    snapshot = bench.store.snapshots.take(bench.new(70).row)
    bench.store.snapshots.drop(snapshot)

    with pytest.raises(ValueError, match="already"):
        bench.store.snapshots.drop(snapshot)
    with pytest.raises(ValueError, match="was dropped"):
        bench.store.restore(snapshot)


def test_a_snapshot_that_fails_in_one_store_leaves_nothing_in_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = build("gpt_oss")
    cache = ModelCache(probe.find_layout(model), SETTINGS["plain"])
    runner = Runner(model, cache)
    row = cache.new_row()
    prefill(runner, row, ids(100))
    last = cache.stores[-1].layers[-1]

    def fail(*_: Any) -> Any:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(last, "copy_tail", fail)
        with pytest.raises(MemoryError):
            cache.snapshots.take(row)
    check_cache(cache)
    assert not any(store.snapshots.all for store in cache.stores)
    snapshot = cache.snapshots.take(row)
    with monkeypatch.context() as patch:
        patch.setattr("kvd.worker.cache.store.fill_tails", fail)
        with pytest.raises(MemoryError):
            cache.restore(snapshot)
    check_cache(cache)
    assert [len(store.rows) for store in cache.stores] == [1] * len(cache.stores)
