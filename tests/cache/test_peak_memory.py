"""Peak memory of a pipelined loop, watched through growth, flush, shrink and step-down.

Step n+1 is launched before step n is read, as the engine does. Then a write into a pool that is
still being read would copy the whole pool: what is allowed beyond the steady state is only what is
reserved for it. Does not cover what a forward pass itself takes: attention's own temporaries are
measured beforehand, with nothing else going on, and counted as part of the steady state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import pytest

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.composite import CacheSettings, ModelCache, SequenceRow
from kvd.worker.cache.kinds import FULL, Kind
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.layout import AttentionPart, Entry, Layout
from kvd.worker.cache.requantize import StepDown
from kvd.worker.cache.scheme import LayerGeometry, Scheme

pytestmark = pytest.mark.mlx

MIB = 1 << 20
GEOMETRY = LayerGeometry(kv_heads=4, k_dim=128, v_dim=128)
WINDOW = Kind(window=512)
SCRATCH = 12 * MIB
NOISE = MIB // 2
"""Index arrays and the like."""


class Loop:
    """A model of four attention layers, three of full attention and one window."""

    def __init__(self) -> None:
        parts = [AttentionPart(kind, GEOMETRY) for kind in (FULL, FULL, FULL, WINDOW)]
        layout = Layout(tuple(Entry((part,)) for part in parts), mx.float32)
        ladder = (Scheme(8, 8), Scheme(4, 4))
        self.cache = ModelCache(layout, CacheSettings(ladder=ladder, scratch=SCRATCH))
        self.token = mx.random.normal((4, 4, 1, 128))
        self.queries = mx.random.normal((4, 4, 1, 128))
        self.flight: list[mx.array] = []
        self.drained = 0
        mx.eval(self.token, self.queries)

    @property
    def growing(self):
        return self.cache.stores[0]

    def fill(self, pages: int) -> SequenceRow:
        """A row of so many pages in the growing store, put there without a prompt's compute."""
        sequence = self.cache.new_row()
        for _ in range(0, pages + 1, 16):
            self.prefill(sequence, 16 * 64)
        return sequence

    def prefill(self, sequence: SequenceRow, count: int) -> None:
        self.drain()
        self.cache.begin_prefill(sequence, count)
        chunk = mx.random.normal((1, 4, count, 128))
        for view in self.cache.views([sequence]):
            view.update_and_fetch(chunk, chunk)
        self.cache.end_pass()
        self.cache.finish_prefill()

    def step(self, sequences: list[SequenceRow]) -> None:
        """Launch a step, and only then wait for the one before it."""
        if self.cache.needs_flush(sequences):
            self.drain()
            self.cache.flush()
        self.cache.begin_decode(sequences)
        count = len(sequences)
        outputs = []
        for view in self.cache.views(sequences):
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
    """Bytes above what was there when the watch began."""

    start: int = 0
    peak: int = 0
    end: int = 0


@contextmanager
def watched(loop: Loop) -> Iterator[Watch]:
    loop.drain()
    gc.collect()  # what earlier tests left in cycles
    mx.clear_cache()
    mx.reset_peak_memory()
    watch = Watch(start=mx.get_active_memory())
    yield watch
    loop.drain()
    watch.peak = mx.get_peak_memory() - watch.start
    mx.clear_cache()
    watch.end = mx.get_active_memory() - watch.start


def of_steps(loop: Loop, sequences: list[SequenceRow]) -> int:
    """What pipelined steps take by themselves, when nothing is written, grown or given back."""
    loop.step(sequences)
    with watched(loop) as watch:
        for _ in range(8):
            loop.step(sequences)
    assert watch.peak < 8 * MIB
    return watch.peak


def share_of_growth(cache: ModelCache) -> int:
    """What `charge` reserves for the copy of a layer's pool, beyond the pools themselves."""
    return cache.charged_bytes - cache.pages_bytes


def test_growth_takes_a_copy_of_one_layers_pool() -> None:
    loop = Loop()
    rows = [loop.fill(220), loop.fill(100)]
    alone = of_steps(loop, rows)
    assert loop.cache.pages_bytes > 50 * MIB
    store = loop.growing
    held = loop.cache.pages_bytes
    capacity = store.allocators[0].capacity
    loop.drain()
    store.take_pages(0, store.allocators[0].free)  # all that is free; nobody needs them
    with watched(loop) as watch:
        while store.allocators[0].capacity == capacity:
            loop.step(rows)
    grown = loop.cache.pages_bytes - held

    assert grown > 0
    assert watch.peak <= grown + share_of_growth(loop.cache) + alone + NOISE
    assert abs(watch.end - grown) <= alone + NOISE


def test_flushes_copy_nothing() -> None:
    loop = Loop()
    rows = [loop.fill(220), loop.fill(20), loop.fill(70)]
    loop.step(rows)
    alone = of_steps(loop, rows)
    before, held = loop.cache.flushes, loop.cache.nbytes
    with watched(loop) as watch:
        for _ in range(260):
            loop.step(rows)

    assert loop.cache.flushes - before >= 2
    assert loop.cache.nbytes == held
    # Pages that await the flush, and dense copies of them where tails are moved up.
    waiting = 3 * 3 * 4 * GEOMETRY.dense_bytes(64)
    smallest = min(side for layer in loop.growing.layers for side in layer.pools[0].side_bytes)
    assert waiting + alone < smallest
    assert watch.peak <= waiting + alone + NOISE


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


def test_stepping_down_stays_within_the_scratch() -> None:
    loop = Loop()
    rows = [loop.fill(150), loop.fill(150), loop.fill(20)]
    alone = of_steps(loop, rows)
    loop.drain()
    loop.cache.flush()
    loop.cache.compact()
    downs = [
        StepDown(store, [one.rows[index] for one in rows[:2]], 1)
        for index, store in enumerate(loop.cache.stores)
    ]
    loop.cache.limit_bytes = 0  # no page ahead of need, as where a grant is used up
    held, used = loop.cache.pages_bytes, loop.cache.pages_used
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

    # Rows went on: what they sealed meanwhile is theirs.
    sealed = (loop.cache.pages_used - used) * loop.growing.charge()
    assert sealed < 4 * MIB
    assert max(peaks) <= SCRATCH + sealed + alone + NOISE
    assert loop.cache.pages_bytes < 0.65 * held
    assert watch.end < -0.35 * held + alone


def test_the_watch_sees_a_pool_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that does not wait for the step in flight is found out."""
    loop = Loop()
    rows = [loop.fill(220), loop.fill(20)]
    alone = of_steps(loop, rows)
    monkeypatch.setattr(Loop, "drain", lambda self: None)
    held: list[mx.array] = []
    flush = LayerStore.flush

    def undrained(layer: LayerStore, *arguments: object) -> None:
        # Somebody reads the pool while it is written.
        held[:] = [array[:, :1] for array in layer.pools[0].arrays()]
        flush(layer, *arguments)

    monkeypatch.setattr(LayerStore, "flush", undrained)
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    for _ in range(200):
        loop.step(rows)
    mx.eval(loop.flight)

    smallest = min(side for layer in loop.growing.layers for side in layer.pools[0].side_bytes)
    assert mx.get_peak_memory() - start > alone + smallest // 2
