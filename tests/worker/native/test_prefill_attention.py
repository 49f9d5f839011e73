"""Prefill attention of the native library: near float64, and the same bits in any chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

pytestmark = pytest.mark.mlx

PAGE = 64


@pytest.fixture
def threads(library: ModuleType) -> Iterator[None]:
    before = library.threads()
    yield
    library.use_threads(before)


@dataclass(frozen=True)
class Case:
    """A chunk, after pages and a dense tail."""

    queries: mx.array
    """``[1, q_heads, count, k_dim]``."""
    keys: mx.array
    """Keys of the tail and the chunk: ``[kv_heads, tail + count, k_dim]``."""
    values: mx.array
    pools: list[mx.array]
    packing: tuple[int, int, bool]
    pages: int
    lows: list[int]
    keep: int = 0
    sinks: mx.array | None = None

    @property
    def offset(self) -> int:
        return self.pages * PAGE + self.keys.shape[1] - self.queries.shape[2]

    def attend(self, library: ModuleType, first: int = 0, end: int | None = None) -> np.ndarray:
        """Attend the chunk's queries from ``first`` to ``end`` in one call."""
        queries, lows = self.queries[:, :, first:end], self.lows[first:end]
        about = [[0, page, page * PAGE] for page in range(self.pages)] or [[0, 0, 0]]
        shown = self.offset + first + len(lows) - self.pages * PAGE
        output = library.prefill_attention(
            queries,
            mx.array(about, mx.int32),
            self.keys[:, :shown],
            self.values[:, :shown],
            mx.array(lows, mx.int32),
            self.pools,
            [self.packing],
            [self.packing],
            self.queries.shape[-1] ** -0.5,
            self.keep,
            self.sinks,
            self.pages,
            self.offset + first,
            self.pages * PAGE,
        )
        return np.array(output[0])

    def exact(self) -> np.ndarray:
        """Return attention in float64, ``[q_heads, count, v_dim]``."""
        bits, group, _ = self.packing
        if bits == 16:
            pages = self.pools
        else:
            sides = self.pools[:3], self.pools[3:]
            pages = [mx.dequantize(*side, group, bits) for side in sides]
        pages = [side[: self.pages] for side in pages]
        old_keys = np.array(pages[0]).transpose(1, 0, 3, 2)  # [heads, pages, 64, k_dim]
        old_values = np.array(pages[1]).transpose(1, 0, 2, 3)
        keys, values = (
            np.concatenate([old.reshape(old.shape[0], -1, old.shape[-1]), np.array(new)], axis=1)
            for old, new in ((old_keys, self.keys), (old_values, self.values))
        )
        repeats = self.queries.shape[1] // keys.shape[0]
        keys, values = (
            np.repeat(one, repeats, axis=0).astype(np.float64) for one in (keys, values)
        )
        queries = np.array(self.queries[0]).astype(np.float64)
        scores = queries @ keys.swapaxes(1, 2) * queries.shape[-1] ** -0.5
        places = np.arange(keys.shape[1])
        last = self.offset + np.arange(queries.shape[1])[:, None]
        seen = (places >= np.array(self.lows)[:, None]) | (places < self.keep)
        scores = np.where(seen & (places <= last), scores, -np.inf)
        if self.sinks is not None:
            sinks = np.broadcast_to(np.array(self.sinks)[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sinks], axis=-1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return weights[..., : keys.shape[1]] @ values

    def check(self, library: ModuleType) -> np.ndarray:
        got, want = self.attend(library), self.exact()
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= 1e-5 * max(1.0, np.abs(want).max())
        return got


def case(
    k_dim: int = 64,
    v_dim: int = 64,
    repeats: int = 2,
    *,
    pages: int = 3,
    tail: int = 20,
    count: int = 70,
    bits: int = 8,
    kv_heads: int = 2,
) -> Case:
    mx.random.seed(count + k_dim)
    sides = (
        mx.random.normal((max(1, pages), kv_heads, k_dim, PAGE)),
        mx.random.normal((max(1, pages), kv_heads, PAGE, v_dim)),
    )
    group = 64 if v_dim % 64 == 0 else 32
    pools = [
        array
        for side in sides
        for array in ((side,) if bits == 16 else mx.quantize(side, group, bits))
    ]
    return Case(
        mx.random.normal((1, kv_heads * repeats, count, k_dim)),
        mx.random.normal((kv_heads, tail + count, k_dim)),
        mx.random.normal((kv_heads, tail + count, v_dim)),
        pools,
        (bits, group, False),
        pages,
        [0] * count,
    )


@pytest.mark.parametrize(
    ("k_dim", "v_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("repeats", [1, 3, 8])
def test_head_sizes_and_shared_heads(
    library: ModuleType, k_dim: int, v_dim: int, repeats: int
) -> None:
    case(k_dim, v_dim, repeats).check(library)


@pytest.mark.parametrize("count", [1, 2, 5, 7, 63, 64, 65, 200])
@pytest.mark.parametrize(("pages", "tail"), [(0, 0), (0, 1), (1, 63), (2, 127)])
def test_lengths(library: ModuleType, count: int, pages: int, tail: int) -> None:
    case(pages=pages, tail=tail, count=count).check(library)


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 0, 1), (0, 2, 1)])
@pytest.mark.parametrize(("count", "tail"), [(1, 0), (6, 64), (70, 20)])
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("v_dim", [64, 84])  # 84: not whole registers
def test_keys_and_values_of_any_strides(
    library: ModuleType, axes: tuple[int, ...], count: int, tail: int, window: int, v_dim: int
) -> None:
    """A prefill pass has all its rows' tokens in one array: heads come after tokens."""
    plain = case(96, v_dim, count=count, tail=tail, bits=16)
    if window:
        plain = replace(plain, lows=[max(0, plain.offset + at - window) for at in range(count)])
    back = [axes.index(axis) for axis in range(3)]
    keys, values = (
        mx.contiguous(side.transpose(axes)).transpose(back) for side in (plain.keys, plain.values)
    )
    found = replace(plain, keys=keys, values=values).check(library)
    assert np.array_equal(found, plain.attend(library))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("count", [1, 70])
def test_precisions(library: ModuleType, bits: int, count: int) -> None:
    case(bits=bits, count=count).check(library)


@pytest.mark.parametrize("count", [1, 3, 70])
def test_levels_and_values_by_channel(library: ModuleType, count: int) -> None:
    """Pages of two levels have the bits of dense pages with the same numbers."""
    dense = case(96, 96, repeats=3, pages=4, bits=16, count=count)
    keys, values = dense.pools
    by_channel = mx.contiguous(values.swapaxes(2, 3))  # as stored: [pages, heads, dim, 64]
    packed = [
        mx.quantize(keys, 64, 8), mx.quantize(by_channel, 32, 5),
        mx.quantize(keys, 32, 4), mx.quantize(values, 32, 3),
    ]  # fmt: skip
    plain = [
        mx.dequantize(*side, group, bits)
        for side, group, bits in zip(packed, (64, 32, 32, 32), (8, 5, 4, 3), strict=True)
    ]
    levels = mx.array([0, 1, 1, 0])[:, None, None, None]
    dense = replace(
        dense,
        pools=[
            mx.where(levels == 0, plain[0], plain[2]),
            mx.where(levels == 0, plain[1].swapaxes(2, 3), plain[3]),
        ],
    )
    want = dense.check(library)
    output = library.prefill_attention(
        dense.queries,
        mx.array([[0, 0, 0], [1, 1, PAGE], [1, 2, 2 * PAGE], [0, 3, 3 * PAGE]], mx.int32),
        dense.keys,
        dense.values,
        mx.array(dense.lows, mx.int32),
        [array for side in packed for array in side],
        [(8, 64, False), (4, 32, False)],
        [(5, 32, True), (3, 32, False)],
        96**-0.5,
        0,
        None,
        4,
        dense.offset,
        4 * PAGE,
    )
    np.testing.assert_array_equal(np.array(output[0]), want)


@pytest.mark.parametrize(("window", "keep"), [(1, 0), (30, 0), (100, 4), (100, 70), (150, 64)])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_and_sinks(library: ModuleType, window: int, keep: int, sinks: bool) -> None:
    whole = case(count=150)
    positions = range(whole.offset, whole.offset + 150)
    lows = [max(0, position - window + 1) for position in positions]
    replace(
        whole, lows=lows, keep=keep, sinks=mx.array([-2.0, 0.0, 3.0, 9.0]) if sinks else None
    ).check(library)


def test_large_and_equal_scores(library: ModuleType) -> None:
    whole = case(count=100)
    replace(whole, queries=whole.queries * 40).check(library)
    replace(whole, queries=whole.queries * 0).check(library)


@pytest.mark.parametrize("repeats", [1, 3, 4])
@pytest.mark.parametrize("window", [1000, 60])
def test_a_query_has_the_same_bits_in_any_chunk_and_with_any_threads(
    library: ModuleType, threads: None, repeats: int, window: int
) -> None:
    whole = case(repeats=repeats, count=260)
    lows = [max(0, position - window + 1) for position in range(whole.offset, whole.offset + 260)]
    whole = replace(whole, lows=lows)
    library.use_threads(1)
    want = whole.check(library)
    for count in (1, 2, 3, 5):
        library.use_threads(count)
        np.testing.assert_array_equal(whole.attend(library), want)
        for first, end in ((0, 1), (0, 100), (37, 43), (100, 260), (255, 260)):
            np.testing.assert_array_equal(whole.attend(library, first, end), want[:, first:end])


def test_later_tokens_that_are_not_finite_change_no_bit_of_earlier_ones(
    library: ModuleType,
) -> None:
    whole = case(count=150)
    want = whole.attend(library)
    at = whole.keys.shape[1] - 50
    for value in (mx.nan, mx.inf):
        keys, values = whole.keys * 1, whole.values * 1
        keys[:, at:], values[:, at:] = value, value
        got = replace(whole, keys=keys, values=values).attend(library)
        np.testing.assert_array_equal(got[:, :100], want[:, :100])
        assert np.isnan(got[:, 100:]).all()
