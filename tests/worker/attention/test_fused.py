"""Decode attention by kernels equals plain operations: the store passes the right arguments.

`tests.worker.attention.stand_in.StandIn` replaces the kernels and reads the same arrays.
"""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.fused import Fused
from kvd.worker.attention.kernels.language import METAL
from kvd.worker.attention.kernels.launch import Launch
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import DecodeHandle
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from protocol import memory_bounds
from tests.worker.attention.stand_in import StandIn
from tests.worker.attention.test_attention import assert_close, queries_for
from tests.worker.cache.helpers import Bench, DenseRow

pytestmark = pytest.mark.mlx

SCHEMES = [Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)]


def bench_of(kernels: StandIn, **how: object) -> Bench:
    bench = Bench(**how)  # type: ignore[arg-type]
    bench.store.backend = kernels.backend()
    return bench


def lower(bench: Bench, row: DenseRow) -> None:
    """Spread a row's pages over all levels in turn."""
    for level in bench.store.pages.levels[1:]:
        due = row.row.pages[level :: len(bench.store.schemes)]
        if due:
            bench.store.pages.convert(0, level, due, [row.row])


def assert_equals_plain_operations(
    bench: Bench, rows: list[DenseRow], sinks: mx.array | None = None, *, fused: bool = True
) -> None:
    handles = bench.decode(rows, batch=len(rows) + 2)
    queries = queries_for(bench, len(rows) + 2, 2)
    for handle in handles:
        assert isinstance(handle, DecodeHandle)
        assert (handle.step.backend is not None) == fused
        got = decode_attention(queries, handle, 0.125, sinks)
        plain = replace(handle, step=replace(handle.step, backend=None))
        assert_close(got, decode_attention(queries, plain, 0.125, sinks))
    mx.eval(bench.store.arrays())


def test_rows_of_any_length_through_flushes_joins_and_leaves() -> None:
    kernels = StandIn()
    bench = bench_of(kernels, scheme=Scheme(4, 4))
    rows = [bench.new(length) for length in (0, 1, 64, 129, 500)]
    for step in range(140):
        if step % 20 < 2:
            assert_equals_plain_operations(bench, rows)
        else:
            bench.decode(rows)
        if step == 50:
            bench.free(rows.pop(1))
        if step == 70:
            rows.insert(0, bench.new(1400))

    bench.check()
    assert kernels.attended == 2 * 14  # layers, steps
    assert kernels.launches >= 2 * kernels.attended


@pytest.mark.parametrize(
    "kind", [FULL, Kind(window=100), Kind(window=300, keep=70), Kind(chunk=128)], ids=str
)
def test_several_levels_and_windows(kind: Kind) -> None:
    bench = bench_of(StandIn(), scheme=SCHEMES, kind=kind)
    rows = [bench.new(length) for length in (900, 30, 640)]
    lower(bench, rows[0])
    assert_equals_plain_operations(bench, rows)
    for _ in range(100):
        bench.decode(rows)
    assert_equals_plain_operations(bench, rows)


def test_sinks_and_heads_of_different_size() -> None:
    geometry = LayerGeometry(kv_heads=2, k_dim=192, v_dim=128)
    bench = bench_of(StandIn(), geometry=geometry, scheme=Scheme(8, 4))
    sinks = mx.array(np.linspace(-2, 3, 4).astype(np.float32))

    assert_equals_plain_operations(bench, [bench.new(300), bench.new(5)], sinks)


def test_steps_with_too_many_levels_use_plain_operations() -> None:
    """Metal allows 31 buffers, enough for a dense level and three quantized ones."""
    schemes = [Scheme(16, 16), *SCHEMES, Scheme(2, 2)]
    bench = bench_of(StandIn(), scheme=schemes)
    row = bench.new(64 * 7)
    pages = row.row.pages
    for level, fused in ((1, True), (2, True), (3, True), (4, False)):
        bench.store.pages.convert(0, level, [PageId(*pages[level])], [row.row])
        assert_equals_plain_operations(bench, [row], fused=fused)


def test_prefill_uses_plain_operations() -> None:
    kernels = StandIn()
    bench = bench_of(kernels)
    row = bench.new(200)
    step = bench.store.begin_prefill(row.row, 5)

    assert step.backend is None
    assert kernels.launches == 0


class Listening(Fused):
    """Records the shapes of the kernels' outputs instead of running the kernels."""

    def __init__(self) -> None:
        super().__init__(METAL)
        self.left: list[list[tuple[int, ...]]] = []

    def _run(self, launch: Launch) -> list[mx.array]:
        self.left.append(launch.output_shapes)
        return [mx.zeros(shape) for shape in launch.output_shapes]


@pytest.mark.parametrize(("rows", "length"), [(1, 40_000), (3, 2_000), (2, 0)])
def test_reserved_memory_covers_the_kernels_outputs(rows: int, length: int) -> None:
    kernels = Listening()
    bench = Bench(LayerGeometry(2, 64, 128), Scheme(4, 4), layers=1)
    bench.store.backend = FusedBackend(kernels, METAL.most_buffers)
    own_rows = [bench.store.new_row() for _ in range(rows)]
    for row in own_rows:
        row.pages = bench.store.pages.take(0, length // 64)
        row.length = length
    step = bench.store.begin_decode(own_rows)
    assert step.backend is not None
    step.backend.padded().attend(mx.zeros((rows, 8, 1, 64)), bench.store.layers[0], 1.0, None)
    nbytes = sum(4 * math.prod(shape) for shape in kernels.left[0])
    config = {"num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 1}

    assert 0 < nbytes <= memory_bounds.parts_bytes(config, rows, length)


def test_lists_of_pages_and_splits_are_reused_until_a_flush() -> None:
    bench = bench_of(StandIn())
    rows = [bench.new(length) for length in (300, 70)]
    steps = []
    for _ in range(2):
        bench.decode(rows)
        assert bench.store.step is not None
        steps.append(bench.store.step.backend)
    first, second = (step.padded() for step in steps if step is not None)

    assert first.pages is second.pages
    assert first.splits is second.splits  # type: ignore[attr-defined]
    assert first.splits.array.shape[0] >= 16  # type: ignore[attr-defined]
