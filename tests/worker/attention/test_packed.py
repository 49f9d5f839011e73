"""Attention of a packed prefill: chunks of several rows, and several chunks of one, in one pass.

Compared with dense attention in float32, and with the result of each chunk in a pass of its own.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.packed import packed_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import PackedHandle, PrefillHandle
from kvd.worker.cache.layer import Chunk
from kvd.worker.cache.packed import Packed
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.native.build import NotBuiltError
from kvd.worker.native.build import load as load_native
from kvd.worker.native.step import Library
from tests.worker.attention.dense import dense_attention
from tests.worker.attention.test_prefill import SLACK, peak_over
from tests.worker.cache.helpers import Bench, DenseRow

pytestmark = pytest.mark.mlx

BEFORE = (0, 1, 63, 64, 65, 200)
COUNTS = (200, 65, 64, 63, 2, 1)
PADDING = 3


class Group:
    """One layer's pass over chunks of several rows, with padding that must not affect results."""

    def __init__(
        self, bench: Bench, rows: list[DenseRow], counts: tuple[int, ...], repeats: int = 2
    ) -> None:
        self.bench, self.rows, self.counts = bench, rows, counts
        store, g = bench.store, bench.geometry
        self.before = [row.shown(0, store) for row in rows]
        self.batch = sum(counts) + PADDING
        store.begin_packed([row.row for row in rows], list(counts), self.batch)
        self.own = [bench._add(row, 0, count) for row, count in zip(rows, counts, strict=True)]
        keys, values = (packed([one[side] for one in self.own], 7.0) for side in (0, 1))
        handle, same = bench.caches[0].update_and_fetch(keys, values)
        assert handle is same
        assert isinstance(handle, PackedHandle)
        self.handle = handle
        shape = (self.batch, g.kv_heads * repeats, 1, g.k_dim)
        self.queries = mx.array(bench.rng.normal(size=shape).astype(np.float32))
        self.scale = g.k_dim**-0.5
        mx.eval(keys, values, self.queries)

    def attend(self, sinks: mx.array | None = None) -> mx.array:
        return packed_attention(self.queries, self.handle, self.scale, sinks)

    def parts(self, packed: mx.array) -> list[mx.array]:
        """Return each chunk's part of queries or outputs, ``[heads, tokens, dim]``."""
        return [packed[part, :, 0].swapaxes(0, 1) for part in self.handle.step.parts()]

    def check(self, sinks: mx.array | None = None) -> None:
        output = self.attend(sinks)
        assert output.shape == (*self.queries.shape[:3], self.bench.geometry.v_dim)
        assert np.isfinite(np.array(output)).all()
        for row, (queries, got) in enumerate(
            zip(self.parts(self.queries), self.parts(output), strict=True)
        ):
            keys, values = (
                mx.concatenate([mx.array(old), new[0]], axis=1)
                for old, new in zip(self.before[row], self.own[row], strict=True)
            )
            want = dense_attention(queries, keys, values, self.scale, sinks, self.bench.store.kind)
            bound = 1e-5 * max(1.0, mx.abs(want).max().item())
            assert mx.abs(got - want).max().item() <= bound

    def finish(self) -> None:
        self.bench.store.finish_prefill()
        self.bench.check()


def packed(chunks: list[mx.array], padding: float) -> mx.array:
    """Return ``[1, heads, tokens, dim]`` arrays joined, as ``[batch, heads, 1, dim]``."""
    together = mx.concatenate(chunks, axis=2)
    extra = [(0, 0), (0, 0), (0, PADDING), (0, 0)]
    return mx.pad(together, extra, constant_values=mx.array(padding)).swapaxes(0, 2)


def bench_of(
    dim: int = 64, kind: Kind = FULL, scheme: Scheme | None = None, heads: int = 2
) -> Bench:
    return Bench(LayerGeometry(heads, dim, dim), scheme or Scheme(8, 8), layers=1, kind=kind)


@pytest.mark.parametrize(
    ("heads", "dim"), [(2, 64), (2, 80), (2, 96), (2, 128), (2, 256), (1, 64), (1, 80)]
)
@pytest.mark.parametrize("repeats", [1, 4])
def test_unequal_rows_with_unequal_pasts(heads: int, dim: int, repeats: int) -> None:
    bench = bench_of(dim, heads=heads)
    rows = [bench.new(length) for length in BEFORE]
    for counts in (COUNTS, COUNTS[::-1]):  # in the second pass, every row has earlier tokens
        case = Group(bench, rows, counts, repeats)
        case.check()
        case.check(mx.array(np.linspace(-2, 9, heads * repeats), mx.float32))
        case.finish()


@pytest.mark.parametrize(
    "kind",
    [Kind(window=1), Kind(window=40), Kind(window=150, keep=70), Kind(chunk=96), Kind(window=512)],
    ids=lambda kind: kind.name,
)
def test_windows_and_chunks(kind: Kind) -> None:
    bench = bench_of(kind=kind)
    rows = [bench.new() for _ in range(4)]
    for counts in ((130, 64, 97, 1), (5, 200, 3, 128), (64, 1, 1, 64)):
        case = Group(bench, rows, counts)
        case.check()
        case.finish()


@pytest.mark.parametrize("counts", [(64, 64, 64), (64, 1, 65), (200, 130, 63)])
@pytest.mark.parametrize("length", [0, 200])
def test_on_the_cpu_a_row_has_the_same_bits_alone_and_in_a_group(
    counts: tuple[int, ...], length: int
) -> None:
    bench = bench_of()
    case = Group(bench, [bench.new(length) for _ in counts], counts)
    outputs, queries = case.parts(case.attend()), case.parts(case.queries)
    for own, together, part in zip(queries, outputs, case.handle.parts, strict=True):
        sides = (part.chunk.keys, part.chunk.values)
        chunk = Chunk(tuple(mx.contiguous(side.swapaxes(0, 1)) for side in sides))
        alone = PrefillHandle(bench.store, part.layer, part.step, chunk)
        expected = prefill_attention(mx.contiguous(own[None]), alone, case.scale)
        assert mx.isfinite(expected).all()
        assert mx.array_equal(together, expected[0])


def test_pages_of_several_rows_are_quantized_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []

    def pack(pool: PagePool, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        pages.append(keys.shape[0])
        return packed_pages(pool, keys, values)

    packed_pages = PagePool.pack
    monkeypatch.setattr(PagePool, "pack", pack)
    bench = bench_of()
    case = Group(bench, [bench.new() for _ in range(4)], (128, 70, 3, 200))
    assert pages == [sum(step.new_pages for step in case.handle.step.steps)]
    case.check()
    case.finish()


def test_tails_of_unequal_lengths_wait_without_padding() -> None:
    """The charge for what waits for the flush counts the tokens of a pass."""
    bench = bench_of()
    counts = (127, *[4] * 31)
    Group(bench, [bench.new() for _ in counts], counts)
    layer = bench.caches[0].layer
    waiting = sum(new.keys.nbytes + new.values.nbytes for new in layer.new_tails)
    assert waiting == bench.geometry.dense_bytes(sum(counts))
    bench.store.finish_prefill()


def test_pages_of_another_dtype_are_quantized_as_alone() -> None:
    """A model's values can be narrower than its keys. A tail in the pass makes them as wide."""
    bench = bench_of()
    layer, count, before = bench.caches[0].layer, 200, bench.new(100).row
    shape = (2 * count, 2, 1, 64)
    keys, values = mx.random.normal(shape), mx.random.normal(shape).astype(mx.bfloat16)
    found = []
    for rows in ([bench.new().row], [before, bench.new().row]):
        some = slice(-len(rows) * count, None)
        bench.store.begin_packed(rows, [count] * len(rows), len(rows) * count)
        bench.caches[0].update_and_fetch(keys[some], values[some])
        (filled,) = layer.pending
        found.append([array[-2:] for array in (*filled.keys, *filled.values)])
        assert bench.store.undo_prefill()
    for alone, together in zip(*found, strict=True):
        assert alone.dtype == together.dtype
        assert mx.array_equal(alone, together)


def test_nan_in_the_padding_affects_no_chunk() -> None:
    bench = bench_of()
    case = Group(bench, [bench.new(100), bench.new()], (70, 3))
    case.queries[-PADDING:] = mx.nan

    assert mx.isfinite(case.attend()).all()
    case.check()
    case.finish()


def test_chunks_of_a_pass_stay_within_the_scratch_together() -> None:
    """A row's pages are copied to dense arrays after the previous row's copies are freed."""
    bench = bench_of()
    rows = [bench.new(2000) for _ in range(6)]
    case = Group(bench, rows, (8,) * 6)
    one = bench.geometry.dense_bytes(2000) * 5  # dense copies and scores of one row
    bench.store.scratch.limit = scratch = 2 * one
    outputs = 2 * case.queries.nbytes

    assert peak_over(case.attend) <= scratch + outputs + SLACK
    case.check()


@pytest.mark.parametrize("kind", [FULL, Kind(window=1900)], ids=lambda kind: kind.name)
def test_chunks_of_one_row_stay_within_the_scratch_together(kind: Kind) -> None:
    """They share a dense copy of the row's pages, or each sees other pages through its window."""
    bench = bench_of(kind=kind)
    row = bench.new(2000).row
    counts = [64] * 24
    bench.store.begin_packed([row] * len(counts), counts, sum(counts))
    shape = (sum(counts), 2, 1, bench.geometry.k_dim)
    keys, values, queries = (mx.random.normal(shape) for _ in range(3))
    handle, _ = bench.caches[0].update_and_fetch(keys, values)
    mx.eval(keys, values, queries)
    one = bench.geometry.dense_bytes(3600) * 5  # dense copies and scores of one chunk
    bench.store.scratch.limit = scratch = one
    outputs = 2 * queries.nbytes

    assert peak_over(lambda: packed_attention(queries, handle, 0.1)) <= scratch + outputs + SLACK
    bench.store.finish_prefill()
    assert row.length == 2000 + sum(counts)


@pytest.mark.parametrize("counts", [(0, 5), (5, 9)])
def test_chunks_that_do_not_fit_the_batch_are_refused(counts: tuple[int, ...]) -> None:
    bench = bench_of()
    rows = [bench.new().row for _ in counts]
    with pytest.raises(ValueError, match="do not fit a batch of 8"):
        bench.store.begin_packed(rows, list(counts), 8)


# Several chunks of one row.


class Successive:
    """Chunks of some rows, run in one pass by one store and in separate passes by another."""

    def __init__(
        self, bench: Bench, other: Bench, lengths: tuple[int, ...], chunks: list[tuple[int, ...]]
    ) -> None:
        self.bench, self.other = bench, other
        self.rows = [(bench.new(), other.new()) for _ in lengths]
        rng = np.random.default_rng(5)

        def random(heads: int, count: int) -> mx.array:
            g = bench.geometry
            return mx.array(rng.normal(size=(1, heads, count, g.k_dim)).astype(np.float32))

        self.random = random
        for (row, twin), length in zip(self.rows, lengths, strict=True):
            for at in range(0, length, 256):
                self._alone(twin, chunk := self._chunk(min(256, length - at)), other)
                self._alone(row, chunk, bench)
        self.chunks = [[self._chunk(count) for count in some] for some in chunks]

    def _chunk(self, count: int) -> tuple[mx.array, mx.array, mx.array]:
        heads = self.bench.geometry.kv_heads
        return self.random(2 * heads, count), self.random(heads, count), self.random(heads, count)

    def _alone(
        self, row: DenseRow, chunk: tuple[mx.array, mx.array, mx.array], bench: Bench
    ) -> mx.array:
        queries, keys, values = chunk
        bench.store.begin_prefill(row.row, keys.shape[2])
        handle, _ = bench.caches[0].update_and_fetch(keys, values)
        output = prefill_attention(queries, handle, 0.3)
        mx.eval(output)
        bench.store.finish_prefill()
        return output

    def run(self) -> None:
        """Attend, and check that results and the cache's content are the same to the bit."""
        want = [
            self._alone(twin, chunk, self.other)
            for (_, twin), some in zip(self.rows, self.chunks, strict=True)
            for chunk in some
        ]
        store = self.bench.store
        every = [chunk for some in self.chunks for chunk in some]
        rows = [
            row.row for (row, _), some in zip(self.rows, self.chunks, strict=True) for _ in some
        ]
        counts = [chunk[1].shape[2] for chunk in every]
        store.begin_packed(rows, counts, sum(counts) + PADDING)
        queries, keys, values = (packed([one[i] for one in every], 7.0) for i in range(3))
        handle, _ = self.bench.caches[0].update_and_fetch(keys, values)
        output = packed_attention(queries, handle, 0.3)
        mx.eval(output)
        for part, expected in zip(handle.step.parts(), want, strict=True):
            assert mx.isfinite(expected).all()
            assert mx.array_equal(output[part, :, 0].swapaxes(0, 1), expected[0])
        store.finish_prefill()
        for row, twin in self.rows:
            assert row.row.length == twin.row.length
            found, right = store.read(row.row, 0), self.other.store.read(twin.row, 0)
            assert mx.array_equal(found[0], right[0])
            assert mx.array_equal(found[1], right[1])


CHUNKED = {
    "short": ((0,), [(64, 64, 64, 1)]),
    "long": ((0, 700), [(256, 256, 256, 33), (256, 63)]),
    "after a tail": ((100, 0, 65), [(28, 128, 128), (5,), (63, 128, 2)]),
}


@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("scheme", [Scheme(16, 16), Scheme(8, 8), Scheme(4, 4)], ids=str)
@pytest.mark.parametrize("case", CHUNKED)
def test_chunks_of_one_row_see_earlier_ones_as_in_separate_passes(
    case: str, scheme: Scheme, *, native: bool
) -> None:
    benches = bench_of(scheme=scheme), bench_of(scheme=scheme)
    use_native(*benches, native=native)
    Successive(*benches, *CHUNKED[case]).run()


@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize(
    "kind",
    [Kind(window=1), Kind(window=100), Kind(window=150, keep=70), Kind(window=300), Kind(chunk=96)],
    ids=lambda kind: kind.name,
)
def test_chunks_of_one_row_with_windows(kind: Kind, *, native: bool) -> None:
    benches = bench_of(kind=kind), bench_of(kind=kind)
    use_native(*benches, native=native)
    Successive(*benches, *CHUNKED["long"]).run()


@pytest.mark.parametrize("share", [1, 3, 40])
def test_chunks_of_one_row_in_parts_or_tiles(share: int) -> None:
    """With less scratch, attention evaluates often, or takes some keys at a time."""
    benches = bench_of(), bench_of()
    for bench in benches:
        bench.store.scratch.limit = bench.geometry.dense_bytes(1000) * share
    Successive(*benches, *CHUNKED["long"]).run()


def use_native(*benches: Bench, native: bool) -> None:
    if not native:
        return
    try:
        library = load_native()
    except NotBuiltError:
        pytest.skip("no C++ compiler")
    for bench in benches:
        bench.store.backend = Library(library)
