"""Packed prefills of whole layers as blocks, compared with the layers' own code.

Plain operations replace the kernels (`tests.worker.attention.stand_in`), which
`tests.worker.kernels` tests.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.attention.fused import FusedBackend, short_splits
from kvd.worker.attention.fused_prefill import FusedPass
from kvd.worker.attention.kernels.arguments import SPLIT_KEYS, Attend, Tiling
from kvd.worker.attention.pass_layout import PassLayout, Room
from kvd.worker.cache import device_pages, model_cache, page_store
from kvd.worker.cache import store as stores
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.flush import Flusher
from kvd.worker.cache.model_cache import ModelCache, Stages, Start
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.page_store import PageStore
from kvd.worker.cache.pass_growth import grow_before
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.store import KVStore
from kvd.worker.gpu import blocks, joined_linear, products
from kvd.worker.serving import runner as runners
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from tests import breadth
from tests.worker.architectures.zoo import build
from tests.worker.attention.stand_in import StandIn
from tests.worker.cache import compiled_kernels
from tests.worker.cache.compiled_kernels import Compiled
from tests.worker.gpu import plain_products

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("plain_operations")]
CLOSE = 2e-2 if mx.cuda.is_available() else 1e-3
"""Error of logits relative to the largest one. A number that lies between two codes of a page may
be rounded either way, and on CUDA products of float32 have the precision of TF32."""


@pytest.fixture
def plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiply", plain_products.multiply)
    monkeypatch.setattr(products, "multiply_gated", plain_products.multiply_gated)


@dataclass
class Side:
    """A runner, and rows that are prefilled several at a time."""

    model: Any
    backend: Backend | None
    schemes: tuple[Scheme, ...] = (Scheme(8, 8), Scheme(8, 4))
    scratch: int = 256 << 20
    rows: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, settings = (
            find_layout(self.model),
            CacheSettings(self.schemes, scratch=self.scratch),
        )
        self.runner = Runner(self.model, ModelCache(layout, settings))
        self.runner.cache.use(page_product, self.backend)
        self.runner.packs = True

    def join(self, count: int) -> None:
        self.rows += [self.runner.cache.new_row() for _ in range(count)]

    def prefill(self, chunks: list[tuple[int, int]]) -> None:
        """Prefill chunks in one pass, each given by its row and its number of tokens."""
        tokens = [[(7 * row + at) % 50 + 5 for at in range(count)] for row, count in chunks]
        self.runner.prefill_pass([self.rows[row] for row, _ in chunks], tokens)

    def prefill_in_stages(
        self, chunks: list[tuple[int, int]], decoding: list[Any], *, waits: bool
    ) -> list[mx.array]:
        """Prefill chunks, with decode steps of other rows after each stage and after the pass.

        Return the logits of the decode steps. ``waits``: whether each step ends before anything
        else is launched. Otherwise the last one before the flush, and the one after it, are left in
        flight.
        """
        cache = self.runner.cache
        found: list[mx.array] = []

        def decode() -> None:
            found.append(self.runner.decode(decoding, mx.arange(len(decoding)) + 9))
            mx.async_eval(found[-1], cache.arrays())
            if waits:
                mx.eval(found[-1], cache.arrays())

        def run_stage(left: int, start: Start) -> None:
            if found and not waits:
                mx.eval(found[-1])  # read, as an engine does before it launches the next one
            start()
            decode()
            assert left >= 0

        tokens = [[(7 * row + at) % 50 + 5 for at in range(count)] for row, count in chunks]
        rows = [self.rows[row] for row, _ in chunks]
        stages = Stages(0.3, run_stage, lambda: mx.eval(found))
        self.runner.prefill_pass(rows, tokens, stages, meanwhile=decode)
        mx.eval(found, cache.arrays())
        return found

    def step(self) -> np.ndarray:
        cache = self.runner.cache
        if cache.needs_flush(self.rows):
            cache.flush()
        logits = self.runner.decode(self.rows, mx.arange(len(self.rows)) + 9)
        mx.eval(logits, cache.arrays())
        return np.array(logits.astype(mx.float32))


class Pair:
    """Runs the same rows with the layers' own code and with blocks."""

    def __init__(self, name: str, **about: Any) -> None:
        plain, _ = build(name)
        fused, _ = build(name)
        joined_linear.join(fused, plain_products.multiply)
        assert blocks.fuse(fused)
        self.kernels = StandIn()
        self.sides = Side(plain, None, **about), Side(fused, self.kernels.backend(), **about)

    def run(self, passes: list[list[tuple[int, int]]], rows: int, close: float = CLOSE) -> None:
        """Prefill ``passes`` of ``rows`` new rows, with a decode step of all rows after each."""
        before = self.kernels.spreads
        for side in self.sides:
            side.join(rows)
        for chunks in passes:
            for side in self.sides:
                side.prefill(chunks)
            want, got = (side.step() for side in self.sides)
            assert np.isfinite(got).all()
            assert np.abs(got - want).max() <= close * np.abs(want).max()
        stores = self.sides[1].runner.cache.stores
        layers = sum(len(store.layers) for store in stores if not store.kind.bounded)
        assert self.kernels.spreads - before == layers * len(passes)


PASSES = {
    "one chunk": [[(0, 64)]],
    "unequal prompts": [[(0, 1), (1, 63), (2, 64), (3, 65), (4, 200)]],
    "prompts of one width": [[(row, 100 + row) for row in range(9)]],
    "chunks of one row": [[(0, 200), (0, 130), (0, 1)], [(0, 64), (0, 64)]],
    "continued": [[(0, 130), (1, 3)], [(1, 70), (0, 300)], [(0, 1), (1, 1)]],
    "many short ones": [[(row, 2) for row in range(20)], [(row, 1 + row % 3) for row in range(20)]],
    "mixed": [[(0, 64), (0, 64), (1, 5), (2, 300)], [(3, 90), (0, 90), (2, 1), (2, 127)]],
}


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_blocks_prefill_like_the_layers_own_code(
    name: str, passes: list[list[tuple[int, int]]]
) -> None:
    if name == "qwen2" and mx.cuda.is_available():
        pytest.skip("mlx 0.32.4's RoPE fails on CUDA for [64, 8, 1, 16]; both sides use it here")
    Pair(name).run(passes, 1 + max(row for chunks in passes for row, _ in chunks))


LONG = [
    [(0, 300), (1, 200), (2, 64), (3, 9)],
    [(0, 10), (1, 80), (2, 70)],
    [(0, 200), (0, 256), (0, 3), (3, 1)],  # row 0: one chunk with and two without splits
]


def test_short_chunks_after_many_keys_attend_in_splits() -> None:
    pair = Pair("qwen3")
    with short_splits(pair.sides[1].runner.cache.stores):
        pair.run(LONG, 4)
    layers = len(pair.sides[1].runner.cache.stores[0].layers)
    assert pair.kernels.combined == 2 * layers


@pytest.mark.parametrize("wrong", [False, True])
def test_the_check_of_passes_at_a_load_covers_splits(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "token_floor", lambda _: 1)
    monkeypatch.setattr(runners, "on_cpu", lambda: False)
    side, kernels = Pair("qwen3").sides[1], StandIn()
    side.runner.cache.use(page_product, kernels.backend())
    attend = kernels.attend

    def attended(given: Attend) -> mx.array:
        found = attend(given)
        return found * 1.5 if wrong and given.splits is not None else found

    monkeypatch.setattr(kernels, "attend", attended)
    assert side.runner.pack() != wrong
    assert kernels.combined > 0
    store = side.runner.cache.stores[0]
    assert isinstance(store.backend, FusedBackend)
    assert store.backend.split_keys == SPLIT_KEYS


def test_splits_are_left_out_if_they_do_not_fit_beside_the_copies() -> None:
    side = Side(build("qwen3")[0], None)
    side.join(2)
    store = side.runner.cache.stores[0]
    rows = [row.rows[0] for row in side.rows]
    for row in rows:
        row.pages = store.pages.take(0, 64)
        row.length = 4096
    step = store.begin_packed(rows, [9, 10], 24)
    copies, entries = 4096 + 1, (9 + 10) * 2  # a token for a part without tails; two splits
    fits, too_small = (
        PassLayout.of(step, Room(copies + 3 * entries - less, 3), Tiling(32, False, 2))
        for less in (0, 1)
    )
    assert fits is not None
    assert too_small is not None
    assert fits.room_tokens == copies + 3 * entries
    one, other = (part.splits for part in fits.parts)
    assert one is not None
    assert other is not None
    assert (one.entries, other.entries) == (18, 20)
    assert other.rows[:, 6:].tolist()[9:12] == [[18, 20], [0, 0], [1, 1]]
    assert [part.splits for part in too_small.parts] == [None, None]


def test_tails_inside_a_pass_are_kept_like_those_of_the_layers_own_code() -> None:
    pair = Pair("qwen3")
    pair.run([[(0, 70), (1, 3)]], 2)
    pair.run([[(0, 300), (0, 256), (0, 9), (1, 60), (1, 256), (1, 255), (1, 1)]], 0)
    kept = [
        [layer.kept for store in side.runner.cache.stores for layer in store.layers]
        for side in pair.sides
    ]
    for plain, fused in zip(*kept, strict=True):
        assert plain is not None
        assert fused is not None
        assert len(plain.spans) == len(fused.spans) == 3
        for number in range(3):
            for want, got in zip(plain.copy(number), fused.copy(number), strict=True):
                assert want.shape == got.shape
                assert mx.isfinite(got).all()
                assert mx.abs(got - want).max() <= CLOSE * mx.abs(want).max()
    for side in pair.sides:  # after each pass, a decode step adds one token
        assert side.rows[0].length == 71 + 565 + 1
        for at in (371, 627):
            side.runner.cache.snapshots.drop(side.runner.cache.snapshots.take(side.rows[0], at))


@pytest.fixture
def page_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    yield from compiled_kernels.use(tmp_path, monkeypatch)


def enable_page_kernels(side: Side) -> None:
    """Check the kernels, as a load does, so that a side's pools use them. These must be empty."""
    layers = [layer for store in side.runner.cache.stores for layer in store.layers]
    for pool in (pool for layer in layers for pool in layer.pools):
        pool.grow(1)
        device_pages.prepare(pool.arrays())
        assert pool.is_written_by_kernel
        pool.cut(0)


def written_by_kernels(rows: int) -> Side:
    """Return a side with blocks and empty rows, whose pages kernels write."""
    side = Pair("qwen3").sides[1]
    enable_page_kernels(side)
    side.join(rows)
    return side


def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run in the order of their launches, as far as the cache knows."""
    for module in (stores, model_cache):
        monkeypatch.setattr(module, "launches_in_order", lambda: True)


def check_steps_in_flight(sides: tuple[Side, Side]) -> None:
    """Prefill twice while other rows decode; one side leaves some of these steps in flight.

    The other side waits for each. All logits must be equal to the bit, also those of 70 later
    steps, in which each row commits a page.
    """
    for side in sides:
        side.join(5)
        side.prefill([(0, 64), (1, 130), (2, 7)])
    for chunks in [[(3, 200), (4, 64)], [(3, 130), (4, 200), (3, 1)]]:
        ready, left = (
            side.prefill_in_stages(chunks, side.rows[:3], waits=waits)
            for side, waits in zip(sides, (True, False), strict=True)
        )
        assert len(left) == len(ready) >= 2
        for want, got in zip(ready, left, strict=True):
            assert mx.isfinite(got).all().item()
            assert mx.array_equal(got, want).item()
    for _ in range(70):
        want, got = (side.step() for side in sides)
        assert np.array_equal(got, want)


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
def test_steps_in_flight_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch)
    model, backend = Pair("qwen3").sides[1].model, StandIn().backend()
    one, other = Side(model, backend), Side(model, backend)
    for side in (one, other):
        enable_page_kernels(side)
    check_steps_in_flight((one, other))


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
def test_a_flush_by_kernels_is_launched_behind_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes whose flush is written by kernels give the same logits."""
    in_order(monkeypatch)
    pair = Pair("qwen3")
    enable_page_kernels(pair.sides[1])
    by_kernel = list[bool]()
    write = Flusher.write

    def noted(flusher: Flusher, *given: Any) -> None:
        by_kernel.append(all(layer.is_flushed_by_kernel for layer in flusher._layers))
        write(flusher, *given)

    monkeypatch.setattr(Flusher, "write", noted)
    for passes in PASSES.values():
        pair.run(passes, 1 + max(row for chunks in passes for row, _ in chunks))
        for side in pair.sides:
            for row in side.rows:
                side.runner.cache.free(row)
            side.rows.clear()
    assert True in by_kernel
    assert False in by_kernel  # the other side's


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
def test_pools_grow_before_a_pass_for_all_of_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that grows pools waits for the pass first, so the host cannot prepare it meanwhile.

    With ``later``, pools grow once for all passes of a prompt.
    """
    in_order(monkeypatch)
    monkeypatch.setattr(page_store, "SLAB_PAGES", 5)
    side = written_by_kernels(2)
    runner, pages = side.runner, side.runner.cache.stores[0].pages
    events = list[str]()
    grow, write = PageStore._grow_to, Flusher.write

    def grown(store: PageStore, *given: Any) -> None:
        events.append("grow")
        grow(store, *given)

    def written(flusher: Flusher, *given: Any) -> None:
        events.append("write")
        write(flusher, *given)

    monkeypatch.setattr(PageStore, "_grow_to", grown)
    monkeypatch.setattr(Flusher, "write", written)
    slab = pages.capacity_ahead(pages.allocators[0])
    chunk = 64 * slab  # fills as many pages as pools get ahead of need
    tokens = [at % 50 + 5 for at in range(chunk)]
    for left in (3, 2, 1, 0):
        runner.prefill_pass([side.rows[0]], [tokens], later=left * chunk)
    assert events == ["grow", *["write"] * 4]
    events.clear()
    for _ in range(2):  # without ``later``, passes grow pools for themselves
        runner.prefill_pass([side.rows[1]], [tokens])
    assert events[-1] == "write"
    assert events.count("grow") >= 1


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
@pytest.mark.parametrize("name", ["mimo_v2_flash", "ministral3", "gemma4_text"])
def test_no_page_moves_once_a_pass_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory is short, the growth of one kind's pools packs the pages of all kinds.

    Each kind grows once, before the pass.
    """
    in_order(monkeypatch)
    found = []
    events = list[str]()
    grow, plan = PageStore._grow_to, KVStore.begin_packed

    def grown(store: PageStore, *given: Any) -> None:
        events.append("grow")
        grow(store, *given)

    def planned(store: KVStore, *given: Any, **more: Any) -> Any:
        events.append("plan")
        return plan(store, *given, **more)

    monkeypatch.setattr(PageStore, "_grow_to", grown)
    monkeypatch.setattr(KVStore, "begin_packed", planned)
    for spare in (None, -5, 0, 3):  # pages beyond those that are missing; None: no limit
        side = Side(build(name)[0], None)
        cache = side.runner.cache
        enable_page_kernels(side)
        side.join(3)
        gone, *rest = side.rows
        for row, factor in zip(side.rows, (3, 7, 9), strict=True):
            side.runner.prefill_pass([row], [[at * factor % 50 + 5 for at in range(640)]])
        cache.free(gone)  # free pages in front of those of the others
        if spare is not None:
            cache.stores[1].pages.cut_to_used()
            wanted = [store.pages.missing_bytes({0: 5}) for store in cache.stores]
            cache.limit_bytes = cache.charged_bytes + cache.tail_slots * cache.row_bytes
            cache.limit_bytes += sum(wanted) + spare * cache.stores[1].pages.charge()
        events.clear()
        side.runner.prefill_pass([rest[0]], [[at * 11 % 50 + 5 for at in range(320)]])
        assert events == [*["grow"] * events.count("grow"), "plan", "plan"]
        assert events.count("grow") <= len(cache.stores)
        side.rows = rest
        found.append(side.step())
    want, *limited = found
    for got in limited:
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
@pytest.mark.parametrize("levels", [(0, 1), (0, 0)])
def test_room_for_later_passes_leaves_memory_for_this_one(levels: tuple[int, int]) -> None:
    side = Side(build("qwen3")[0], None)
    enable_page_kernels(side)
    side.join(2)
    cache = side.runner.cache
    store = cache.stores[0]
    rows = [row.rows[0] for row in side.rows]
    for row, level in zip(rows, levels, strict=True):
        row.level = level
    limit = sum(110 * store.pages.charge(level) for level in levels)
    cache.limit_bytes = limit + cache.tail_slots * cache.row_bytes
    grow_before([store], [rows], [6400, 6400], later=100_000)
    for level in set(levels):
        assert store.pages.allocators[level].can_take(99 * levels.count(level))
    assert cache.charged_bytes <= limit


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
@pytest.mark.parametrize(
    ("name", "schemes", "more", "ahead"),
    [
        ("qwen3", (Scheme(8, 8),), {}, True),
        ("qwen3", (Scheme(16, 16), Scheme(8, 8)), {"quantized_start": 512}, False),
        ("qwen3", (Scheme(8, 8),), {"max_size": 4096}, False),
        ("mimo_v2_flash", (Scheme(8, 8),), {}, False),
    ],
    ids=["plain", "dense start", "window", "two kinds"],
)
def test_pools_grow_for_later_passes_only_if_these_fill_them(
    name: str, schemes: tuple[Scheme, ...], more: dict[str, int], ahead: bool
) -> None:
    """Pages of a dense start and of a window are freed, and kinds need different pages."""
    model = build(name)[0]
    side = Side(model, None)
    settings = CacheSettings(schemes, scratch=side.scratch, **more)
    side.runner = Runner(model, ModelCache(find_layout(model), settings))
    enable_page_kernels(side)
    side.join(1)
    cache = side.runner.cache
    rows = [[side.rows[0].rows[index]] for index in range(len(cache.stores))]
    grow_before(cache.stores, rows, [256], later=64_000)
    capacity = max(one.capacity for store in cache.stores for one in store.pages.allocators)
    assert (capacity >= 1000) == ahead


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
def test_a_flush_is_waited_for_if_kernels_may_run_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (stores, model_cache):
        monkeypatch.setattr(module, "launches_in_order", lambda: False)
    side = written_by_kernels(1)
    side.runner.prefill_pass([side.rows[0]], [[5] * 200], waits=False)
    assert not side.runner.cache.stores[0].flusher._launched


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
def test_a_failed_step_leaves_no_launched_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch)
    side = written_by_kernels(1)
    side.runner.prefill_pass([side.rows[0]], [[5] * 200], waits=False)
    cache = side.runner.cache
    assert cache.stores[0].flusher._launched
    cache.discard()
    assert not cache.stores[0].flusher._launched


@compiled_kernels.needs_gcc
@pytest.mark.usefixtures("page_kernels")
def test_the_host_works_while_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch)
    side = written_by_kernels(1)
    runner, (row,) = side.runner, side.rows
    flusher = runner.cache.stores[0].flusher
    waiting = list[tuple[int, bool]]()

    def meanwhile() -> None:
        waiting.append((row.length, bool(flusher._launched)))

    tokens = [at % 50 + 5 for at in range(200)]
    runner.prefill_pass([row], [tokens], meanwhile=meanwhile)
    assert waiting == [(200, True)]
    assert not flusher._launched
    runner.prefill_pass([row], [tokens], waits=False)
    assert flusher._launched
    runner.cache.wait()
    assert not flusher._launched

    def fail() -> None:
        raise RuntimeError("no checkpoint")

    with pytest.raises(RuntimeError, match="no checkpoint"):
        runner.prefill_pass([row], [tokens], meanwhile=fail)
    assert not flusher._launched  # the device is idle when the failure is handled


@pytest.mark.parametrize(
    "schemes",
    [(Scheme(16, 16),), (Scheme(4, 4),), (Scheme(3, 6, 32, 32),)],
    ids=["dense", "k4v4", "k3v6"],
)
def test_pages_of_every_kind(schemes: tuple[Scheme, ...]) -> None:
    Pair("qwen3", schemes=schemes).run(PASSES["mixed"], 4)


def test_rows_on_different_levels_share_a_pass() -> None:
    pair = Pair("qwen3")
    for side in pair.sides:
        side.join(3)
        side.prefill([(0, 200), (1, 200), (2, 200)])
        side.runner.cache.flush()
        side.runner.step_down([side.rows[1]], 1).advance(1e9, lambda: 0.0)
    # Codes of 4 bits are further apart.
    pair.run([[(0, 200), (1, 200), (2, 80)]], 0, close=2 * CLOSE)


def test_copies_that_exceed_the_scratch_are_made_in_turn() -> None:
    """The smaller scratch has room for three copies of 60 tokens, and for one of 120 or 180."""
    passes = [[(row, 60) for row in range(3)] for _ in range(4)]
    token_bytes = Pair("qwen3").sides[0].runner.cache.stores[0].layers[0].geometry.dense_bytes(1)
    unpacks = []
    for scratch in (64 << 20, 200 * token_bytes * 4 // 3):
        pair = Pair("qwen3", scratch=scratch)
        pair.run(passes, 3)
        unpacks.append(pair.kernels.unpacks)
    assert unpacks == [3 * 3, 3 * (1 + 3 + 3)]


def test_a_row_that_is_too_long_for_the_scratch_runs_the_layers_own_code() -> None:
    pair = Pair("qwen3", scratch=1 << 18)
    for side in pair.sides:
        side.join(1)
        side.prefill([(0, 400)])
        side.prefill([(0, 100)])
    want, got = (side.step() for side in pair.sides)
    assert np.abs(got - want).max() <= CLOSE * np.abs(want).max()
    assert pair.kernels.spreads == 3  # in the first pass, which reads no copies


def test_dense_copies_are_freed_before_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which a worker rarely runs."""
    seen: list[weakref.ref[FusedPass]] = []
    attend, write = FusedPass.attend, Flusher.write

    def note(self: FusedPass, *given: Any) -> mx.array:
        assert self.copies is not None
        assert scratch.held == sum(side.nbytes for side in self.copies)
        seen.append(weakref.ref(self))
        return attend(self, *given)

    def check(*given: Any, **named: Any) -> None:
        assert [one() for one in seen] == [None] * len(seen)
        write(*given, **named)

    pair = Pair("qwen3")
    scratch = pair.sides[1].runner.cache.stores[0].scratch
    for side in pair.sides:
        side.join(1)
        side.prefill([(0, 100)])
    gc.disable()
    try:
        monkeypatch.setattr(FusedPass, "attend", note)
        monkeypatch.setattr(Flusher, "write", check)
        pair.sides[1].prefill([(0, 100)])
    finally:
        gc.enable()
    assert len(seen) == 3
    assert scratch.held == 0


@settings(max_examples=25 if breadth.ALL else 10, deadline=None)
@given(data=st.data())
def test_random_passes(data: st.DataObject) -> None:
    counts = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 190])
    passes = [
        [
            (row, count)
            for row in range(4)
            for count in data.draw(st.lists(counts, max_size=3), f"row {row}")
        ]
        for _ in range(2)
    ]
    passes = [[(row, 3) for row in range(4)], *filter(None, passes)]
    Pair("qwen3").run(passes, 4)
