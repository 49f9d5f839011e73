"""Peak memory of a pipelined loop during growth, flush, shrink and step-down.

As in the engine, step n+1 is launched before step n is read. A write into a pool that is still
being read would copy the whole pool. The peak may exceed the steady state only by what is reserved
for the operation. Does not cover the memory of forward passes: attention's temporaries are measured
beforehand, and count as part of the steady state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.packed import packed_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import RectangleKVCache
from kvd.worker.cache.layer import FlushWrites, LayerStore
from kvd.worker.cache.layout import Access, AttentionPart, Entry, Layout, StatePart
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.step_down import ModelStepDown, StepDown
from kvd.worker.scheduling.prefill_order import PrefillOrder
from kvd.worker.scheduling.request import QueueKey, ScheduledRequest
from kvd.worker.serving.runner import Runner

pytestmark = pytest.mark.mlx

MIB = 1 << 20
GEOMETRY = LayerGeometry(kv_heads=4, k_dim=128, v_dim=128)
WINDOW = Kind(window=512)
SCRATCH = 12 * MIB
STATE = StatePart(((1, 1 << 19),), (mx.float32,))
NOISE = MIB // 2
"""Allowance for index arrays and similar small arrays."""


class Loop:
    """A model of three layers with full attention and one with a window.

    It also has ``states`` recurrent layers, with 2 MiB per sequence each.
    """

    def __init__(self, *, quantized_start: int = 0, states: int = 0) -> None:
        parts = [AttentionPart(kind, GEOMETRY) for kind in (FULL, FULL, FULL, WINDOW)]
        entries = [Entry((part,)) for part in (*parts, *[STATE] * states)]
        settings = CacheSettings(
            schemes=(Scheme(8, 8), Scheme(4, 4)), scratch=SCRATCH, quantized_start=quantized_start
        )
        self.cache = ModelCache(Layout(tuple(entries), mx.float32), settings)
        self.token = mx.random.normal((4, 4, 1, 128))
        self.queries = mx.random.normal((4, 4, 1, 128))
        self.flight: list[mx.array] = []
        self.drained = 0
        mx.eval(self.token, self.queries)

    @property
    def growing(self):
        """The store of the layers with full attention, which grows with the rows."""
        return self.cache.stores[0]

    def fill(self, pages: int) -> SequenceRow:
        """Return a row with at least ``pages`` pages in the growing store, without attention."""
        sequence = self.cache.new_row()
        for _ in range(0, pages + 1, 16):
            self.prefill(sequence, 16 * 64)
        return sequence

    def prefill(self, sequence: SequenceRow, count: int) -> None:
        self.drain()
        self.cache.begin_prefill(sequence, count)
        chunk = mx.random.normal((1, 4, count, 128))
        for view in self.cache.views([sequence]):
            if isinstance(view, ArraysCache):
                self.recur(view, 1)
            else:
                view.update_and_fetch(chunk, chunk)
        self.cache.end_pass()
        self.cache.finish_prefill()

    def recur(self, view: ArraysCache, batch: int) -> mx.array:
        before = mx.zeros((batch, *STATE.shapes[0][1:])) if view[0] is None else view[0]
        view[0] = before * 0.5 + 1.0
        return view[0].mean(axis=1, keepdims=True)

    def step(self, sequences: list[SequenceRow], batch: int | None = None) -> None:
        """Launch a step, then wait for the previous one."""
        if self.cache.needs_flush(sequences):
            self.drain()
            self.cache.flush()
        self.cache.begin_decode(sequences, batch)
        count = len(sequences)
        outputs = []
        for view in self.cache.views(sequences):
            if isinstance(view, ArraysCache):
                outputs.append(self.recur(view, batch or count))
                continue
            handle, _ = view.update_and_fetch(self.token[:count], self.token[:count])
            outputs.append(decode_attention(self.queries[:count], handle, 0.1))
        self.cache.end_pass()
        mx.async_eval(outputs, self.cache.arrays())
        before, self.flight = self.flight, outputs
        mx.eval(before)

    def drain(self) -> None:
        mx.eval(self.flight, self.cache.arrays())
        self.flight = []


@dataclass
class Watch:
    """Bytes in use at the start, and the bytes above that at the peak and at the end."""

    start: int = 0
    peak: int = 0
    end: int = 0


@contextmanager
def watched(loop: Loop) -> Iterator[Watch]:
    loop.drain()
    gc.collect()  # free cycles of earlier tests
    mx.clear_cache()
    mx.reset_peak_memory()
    watch = Watch(start=mx.get_active_memory())
    yield watch
    loop.drain()
    watch.peak = mx.get_peak_memory() - watch.start
    mx.clear_cache()
    watch.end = mx.get_active_memory() - watch.start


def of_steps(loop: Loop, sequences: list[SequenceRow]) -> int:
    """Return the peak bytes of pipelined steps in which no pool is written or resized."""
    loop.step(sequences)
    with watched(loop) as watch:
        for _ in range(8):
            loop.step(sequences)
    assert watch.peak < 8 * MIB
    return watch.peak


def share_of_growth(cache: ModelCache) -> int:
    """Return the bytes that charges reserve for the copy that growing a layer's pool takes."""
    return cache.charged_bytes - cache.usage.pages_bytes


@pytest.mark.slow
def test_growth_takes_a_copy_of_one_layers_pool() -> None:
    loop = Loop()
    rows = [loop.fill(220), loop.fill(100)]
    alone = of_steps(loop, rows)
    assert loop.cache.usage.pages_bytes > 50 * MIB
    store = loop.growing
    held = loop.cache.usage.pages_bytes
    capacity = store.pages.allocators[0].capacity
    loop.drain()
    # Take all free pages, so that the pools must grow.
    store.pages.take(0, store.pages.allocators[0].free)
    with watched(loop) as watch:
        while store.pages.allocators[0].capacity == capacity:
            loop.step(rows)
    grown = loop.cache.usage.pages_bytes - held

    assert grown > 0
    assert watch.peak <= grown + share_of_growth(loop.cache) + alone + NOISE
    assert abs(watch.end - grown) <= alone + NOISE


@pytest.mark.slow
def test_flushes_copy_nothing() -> None:
    loop = Loop()
    rows = [loop.fill(220), loop.fill(20), loop.fill(70)]
    loop.step(rows)
    alone = of_steps(loop, rows)
    before, held = loop.cache.usage.flushes, loop.cache.nbytes
    with watched(loop) as watch:
        steps = 0
        while loop.cache.usage.flushes - before < 2:
            loop.step(rows)
            steps += 1

    assert steps <= 260
    assert loop.cache.nbytes == held
    # Pages that wait for the flush, and copies of tails that drop their committed tokens.
    waiting = 3 * 3 * 4 * GEOMETRY.dense_bytes(64)
    smallest = min(side for layer in loop.growing.layers for side in layer.pools[0].side_bytes)
    assert waiting + NOISE < smallest  # so that a copy would be detected
    assert watch.peak <= waiting + alone + NOISE


@pytest.mark.slow
def test_shrinking_takes_a_copy_of_one_layers_pool_and_gives_the_rest_back() -> None:
    loop = Loop()
    rows = [loop.fill(100), loop.fill(100), loop.fill(100)]
    alone = of_steps(loop, rows)
    loop.drain()
    loop.cache.flush()
    loop.cache.free(rows.pop(0))
    held, reserved = loop.cache.nbytes, share_of_growth(loop.cache)
    with watched(loop) as watch:
        for _ in range(3):
            loop.step(rows)
        loop.drain()
        loop.cache.flush()
        freed = loop.cache.compact()
        for _ in range(3):
            loop.step(rows)

    assert freed == held - loop.cache.nbytes > 10 * MIB
    assert watch.peak <= reserved + alone + NOISE
    assert abs(watch.end + freed) <= alone + NOISE


@pytest.mark.slow
def test_stepping_down_stays_within_the_scratch() -> None:
    loop = Loop()
    rows = [loop.fill(150), loop.fill(150), loop.fill(20)]
    alone = of_steps(loop, rows)
    loop.drain()
    loop.cache.flush()
    loop.cache.compact()
    downs = [
        StepDown(store, [one.rows[index] for one in rows[:2]], 1, scratch=SCRATCH)
        for index, store in enumerate(loop.cache.stores)
    ]
    loop.cache.limit_bytes = 0  # no growth ahead of need, as when a grant is used up
    held, used = loop.cache.usage.pages_bytes, loop.cache.usage.pages_used
    peaks = []
    with watched(loop) as watch:
        for down in downs:
            while not down.over:
                loop.drain()
                mx.reset_peak_memory()
                down.advance(0.0, lambda: 1.0)
                peaks.append(mx.get_peak_memory() - watch.start)
                loop.step(rows)
                peaks.append(mx.get_peak_memory() - watch.start)
                loop.drain()
                loop.cache.flush()

    # The rows went on decoding, and the pages that they committed take memory too.
    committed = (loop.cache.usage.pages_used - used) * loop.growing.pages.charge()
    assert committed < 4 * MIB
    assert max(peaks) <= SCRATCH + committed + alone + NOISE
    assert loop.cache.usage.pages_bytes < 0.65 * held
    assert watch.end < -0.35 * held + alone


@pytest.mark.slow
def test_prefills_between_slices_of_a_step_down_share_the_scratch_with_it() -> None:
    """The scratch covers both what a step-down adds and a chunk's dense copies."""
    loop = Loop()
    rows = [loop.fill(150), loop.fill(150)]
    long = loop.fill(60)
    loop.drain()
    loop.cache.flush()
    loop.cache.compact()
    loop.cache.limit_bytes = 0  # no growth ahead of need
    count, heads = 256, GEOMETRY.kv_heads
    chunk = mx.random.normal((1, heads, count, GEOMETRY.k_dim))
    queries = mx.random.normal((1, heads, count, GEOMETRY.k_dim))
    mx.eval(chunk, queries)
    used = loop.cache.usage.pages_used
    lowering = ModelStepDown(loop.cache, rows, 1)
    peaks = []
    with watched(loop) as watch:
        while not lowering.over:
            mine = (loop.cache.usage.pages_used - used) * loop.growing.pages.page_bytes()
            mx.reset_peak_memory()
            lowering.advance(0.0, lambda: 1.0)
            peaks.append(mx.get_peak_memory() - watch.start - mine)
            if long.length > 100 * 64:
                continue
            mx.reset_peak_memory()
            loop.cache.begin_prefill(long, count)
            outputs = []
            for view in loop.cache.views([long]):
                handle, _ = view.update_and_fetch(chunk, chunk)
                outputs.append(prefill_attention(queries, handle, 0.1).sum())
            loop.cache.end_pass()
            mx.eval(outputs)
            peaks.append(mx.get_peak_memory() - watch.start - mine)
            loop.cache.finish_prefill()  # pools may grow: charges cover the copy

    assert long.length > 100 * 64
    # For each of four layers: the chunk with its tail, and the pages that wait for the flush.
    tails = 4 * (GEOMETRY.dense_bytes(count + 128) + 4 * loop.growing.pages.layer_page_bytes[0][0])
    assert max(peaks) <= SCRATCH + tails + NOISE


@pytest.mark.slow
def test_a_packed_pass_stays_within_the_memory_of_a_single_chunk() -> None:
    """Each row needs memory for its tail and for dense copies of its pages, so only 5 rows fit."""
    loop = Loop()
    chunk, width = 256, 8
    rows = [loop.fill(15) for _ in range(33)]
    waiting = [
        ScheduledRequest(
            str(number),
            prompt_len=1024 + width + 1,
            max_new=1,
            queue_key=QueueKey(number, number),
            priority=0,
            deadline=None,
            choices=1,
            prefilled=1024,
        )
        for number in range(len(rows))
    ]
    group = PrefillOrder(chunk=chunk, budget=chunk, group=True).choose(waiting)
    chosen = [rows[int(one.rid)] for one in group]
    total = len(chosen) * width
    own = mx.random.normal((total, GEOMETRY.kv_heads, 1, GEOMETRY.k_dim))
    mx.eval(own)
    with watched(loop) as watch:
        loop.cache.begin_packed(chosen, [width] * len(chosen), total)
        outputs = []
        for view in loop.cache.views(chosen):
            handle, _ = view.update_and_fetch(own, own)
            outputs.append(packed_attention(own, handle, 0.1).sum())
        loop.cache.end_pass()
        mx.eval(outputs)
        loop.cache.finish_prefill()

    assert {row.length for row in rows} == {1024, 1024 + width}
    assert len(chosen) == 5
    assert watch.peak <= SCRATCH * 3 // 4 + 4 * GEOMETRY.dense_bytes(chunk + 127) + NOISE


def test_rows_that_start_dense_stay_within_their_reservation() -> None:
    loop = Loop(quantized_start=1024)
    lengths, chunk = [4096, 1536, 3072], 512
    cache = loop.cache
    cache.limit_bytes = sum(
        cache.costs.pages_bytes(one, chunk) + cache.row_bytes for one in lengths
    )
    # A chunk before it is packed, and 16 pages that are being converted.
    moving = 8 * GEOMETRY.dense_bytes(chunk) + 3 * GEOMETRY.dense_bytes(16 * 64)
    with watched(loop) as watch:
        rows = [cache.new_row() for _ in lengths]
        for _ in range(7):
            for row, length in zip(rows, lengths, strict=True):
                if row.length < length - chunk:
                    loop.prefill(row, chunk)
    reserved = cache.limit_bytes

    assert cache.charged_bytes + cache.tail_slots * cache.row_bytes <= reserved
    assert watch.peak <= reserved + moving + NOISE
    assert watch.peak > 0.5 * reserved


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 7])
def test_recurrent_states_stay_within_the_charge_of_rows(padding: int) -> None:
    alone = of_steps(quiet := Loop(), [quiet.fill(2) for _ in range(4)])
    del quiet
    loop = Loop(states=6)
    cache = loop.cache
    with watched(loop) as watch:
        rows = [loop.fill(2) for _ in range(4)]
        for number in range(12):
            if number == 5:
                loop.drain()
                cache.free(rows.pop(1))
            if number == 8:
                rows.append(loop.fill(2))
            loop.step(rows, len(rows) + padding)
    states = 4 * cache.states.charged_row_bytes
    paged = cache.usage.pages_bytes + 4 * GEOMETRY.dense_bytes(192) * cache.tail_slots
    # Two layers' padded inputs and outputs.
    inside = 4 * (4 + padding) * STATE.nbytes

    assert watch.peak <= states + paged + share_of_growth(cache) + alone + inside + 8 * MIB
    assert watch.end <= paged + 4 * cache.states.row_bytes + NOISE


LATENT = LayerGeometry(kv_heads=1, k_dim=256, v_dim=32)


class Latent:
    """A model whose three layers read keys and values from rectangles."""

    def __call__(self, tokens: mx.array, cache: list[RectangleKVCache]) -> mx.array:
        x = tokens[:, None, :, None].astype(mx.float32)
        for view in cache:
            keys, values = view.update_and_fetch(
                mx.broadcast_to(mx.sin(x), (*x.shape[:3], 256)),
                mx.broadcast_to(mx.cos(x), (*x.shape[:3], 32)),
            )
            seen = keys.sum(axis=(1, 2, 3)) / 256 + values.sum(axis=(1, 2, 3))
            x = x + mx.sin(seen)[:, None, None, None]
        return x[:, 0]


def latent_runner(scratch: int) -> Runner:
    layout = Layout((Entry((AttentionPart(FULL, LATENT),)),) * 3, mx.float32)
    settings = CacheSettings(schemes=(Scheme(8, 8),), scratch=scratch)
    return Runner(Latent(), ModelCache(layout, settings, access={FULL: Access.RECTANGLES}))


def run_latent(runner: Runner, lengths: list[int], chunk: int) -> list[mx.array]:
    """Prefill rows of these lengths, and decode them in a pipelined loop."""
    cache = runner.cache
    rows = [cache.new_row() for _ in lengths]
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for start in range(0, length, chunk):
            runner.prefill(row, [number + place for place in range(start, start + chunk)])
    found: list[mx.array] = []
    for number in range(6):
        logits = runner.decode(rows, mx.arange(len(rows)) + number)
        mx.async_eval(logits, cache.arrays())
        mx.eval(found)
        found.append(logits)
    mx.eval(found, cache.arrays())
    return found


@pytest.mark.slow
def test_rectangles_take_no_more_than_the_scratch_and_the_charge() -> None:
    """The rows' lengths differ widely, and the longest row alone needs more than the scratch."""
    chunk, lengths = 512, [4096] + [512] * 7
    runner = latent_runner(4 * MIB)
    cache = runner.cache
    reserved = sum(cache.costs.pages_bytes(one + 64, chunk) + cache.row_bytes for one in lengths)
    cache.limit_bytes = reserved
    beyond = cache.costs.pages_bytes(4096, chunk) - cache.stores[0].most_bytes(4096, chunk)
    assert beyond > 4 * MIB
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    split = run_latent(runner, lengths, chunk)
    peak = mx.get_peak_memory() - start
    # A chunk's tokens in three layers, before and after packing.
    moving = 3 * 3 * LATENT.dense_bytes(chunk)

    assert len(cache.rectangles.passes(cache.sequences)) > 1
    assert peak <= reserved + 4 * MIB + moving + NOISE
    wide = latent_runner(1 << 30)
    together = run_latent(wide, lengths, chunk)
    assert len(wide.cache.rectangles.passes(wide.cache.sequences)) == 1
    for one, other in zip(split, together, strict=True):
        assert mx.isfinite(one).all().item()
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-4).item()


def test_memory_of_steps_over_rectangles_does_not_add_up() -> None:
    """All layers of one step fit the scratch, but those of eight steps do not."""
    runner = latent_runner(16 * MIB)
    run_latent(runner, [512] * 3, 256)
    cache = runner.cache
    mx.clear_cache()
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    rows = cache.sequences
    assert len(cache.rectangles.passes(rows)) == 1
    found = []
    for _ in range(8):  # all steps are launched before any result is read
        found.append(runner.decode(rows, mx.arange(3)))
        mx.async_eval(found[-1], cache.arrays())
    mx.eval(found)

    assert mx.get_peak_memory() - start <= 12 * MIB + NOISE


@pytest.mark.slow
def test_the_watch_detects_a_copied_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch detects a flush that does not wait for the step in flight."""
    loop = Loop()
    rows = [loop.fill(220), loop.fill(20)]
    alone = of_steps(loop, rows)
    monkeypatch.setattr(Loop, "drain", lambda self: None)
    held: list[mx.array] = []
    put = LayerStore.put

    def undrained(layer: LayerStore, writing: FlushWrites) -> None:
        # Keep the pool referenced while it is written, as a step in flight would.
        held[:] = [array[:, :1] for array in layer.pools[0].arrays()]
        put(layer, writing)

    monkeypatch.setattr(LayerStore, "put", undrained)
    monkeypatch.setattr(PagePool, "write_in_place", PagePool.write)  # as on accelerators
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    before = loop.cache.usage.flushes
    while loop.cache.usage.flushes == before:
        loop.step(rows)
    loop.step(rows)
    mx.eval(loop.flight)

    smallest = min(side for layer in loop.growing.layers for side in layer.pools[0].side_bytes)
    assert mx.get_peak_memory() - start > alone + smallest // 2


def test_a_moved_tail_copies_only_itself() -> None:
    layer = LayerStore(GEOMETRY, [Scheme(8, 8)], mx.float32)
    layer.tail_keys, layer.tail_values = (
        mx.random.normal((32, *side.shape[1:])) for side in (layer.tail_keys, layer.tail_values)
    )
    mx.eval(layer.tail_keys, layer.tail_values)
    moved, own = mx.array(layer.tail_keys[31]), layer.tail_bytes // 32
    mx.eval(moved)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    layer.move_tail(31, 0)
    assert mx.get_peak_memory() - before <= 2 * own + NOISE
    assert mx.array_equal(layer.tail_keys[0], moved)
