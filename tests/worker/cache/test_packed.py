"""Packed pages: their content, and products with them compared to dense products."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from bench.gpu.graph import primitives
from kvd.worker.cache import packed as pk
from kvd.worker.cache.packed import PageIndex, Slots, entries, take
from kvd.worker.cache.scheme import BITS, Packing

pytestmark = pytest.mark.mlx

PAGES, HEADS, REPEATS = 5, 2, 3
SHAPES = [(dim, 64) for dim in (8, 64, 80, 96, 112, 128, 256, 576)] + [
    (64, dim) for dim in (32, 64, 96, 128, 256, 576)
]
QUANTIZED = [
    (Packing(bits, group), shape)
    for bits, group, shape in itertools.product(BITS[:-1], (32, 64, 128), SHAPES)
    if shape[1] % group == 0
]
DENSE = [(Packing(16), shape) for shape in SHAPES]


def pages(shape: tuple[int, int]) -> mx.array:
    mx.random.seed(shape[0] + shape[1])
    # Channels differ in size and offset, like those of real keys.
    scale = mx.linspace(0.3, 2.0, shape[0])[:, None]
    return mx.random.normal((PAGES, HEADS, *shape)) * scale + 0.2


def index() -> PageIndex:
    """Pairs pages 4, 0, 0 of the pool with rows 1, 0, 2 of the operand, for each head."""
    heads = mx.arange(HEADS, dtype=mx.uint32)
    rows, slots = (mx.array(it, mx.uint32)[:, None] for it in ([1, 0, 2], [4, 0, 0]))
    return PageIndex(rows * HEADS + heads, slots * HEADS + heads)


@pytest.mark.slow
@pytest.mark.parametrize("product", [pk.page_product, pk.page_product_by_copy])
@pytest.mark.parametrize("transpose", [False, True])
def test_products_agree_with_dense_ones(product, transpose: bool):
    assert len(QUANTIZED) == 6 * (8 * 2 + 12), (
        "groups of 32 and 64 per channel, and all that fit per token"
    )
    for packing, shape in QUANTIZED + DENSE:
        packed = pk.pack(pages(shape), packing)
        x = mx.random.normal((3, HEADS, REPEATS, shape[1 if transpose else 0]))
        page = pk.unpack(packed, packing)[mx.array([4, 0, 0])]
        want = x[mx.array([1, 0, 2])] @ (page.swapaxes(-1, -2) if transpose else page)

        got = product(x, packed, packing, index(), transpose=transpose)

        assert got.shape == want.shape
        assert mx.isfinite(got).all()
        error = (mx.abs(got - want).max() / mx.abs(want).max()).item()
        assert error < 1e-5, (packing, shape)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", BITS[:-1])
def test_errors_are_at_most_a_quantization_step(bits: int, group: int):
    dense, packing = pages((64, 256)), Packing(bits, group, per_token=True)
    shown = pk.unpack(pk.pack(dense, packing), packing)
    groups = np.array(dense).reshape(-1, group)
    steps = np.ptp(groups, axis=1) / (2**bits - 1)

    assert mx.isfinite(shown).all()
    error = np.abs(np.array(shown).reshape(-1, group) - groups).max(axis=1)
    # MLX stores the extreme of larger magnitude exactly. The other may be off by a whole step.
    assert (error <= steps * 1.01 + 1e-6).all()
    assert (error > steps * 0.1).any(), "nothing was quantized"


@pytest.mark.parametrize(("packing", "shape"), QUANTIZED[:: len(QUANTIZED) // 12] + DENSE[:1])
def test_empty_storage_has_the_shape_of_packed_pages(packing: Packing, shape: tuple[int, int]):
    packed = pk.pack(pages(shape), packing)
    empty = pk.empty(PAGES, HEADS, *shape, packing, mx.float32)

    assert [(it.shape, it.dtype) for it in empty] == [(it.shape, it.dtype) for it in packed]


def test_pages_of_width_0():
    """An empty value side is not quantized, and its product is empty."""
    packing = Packing(16, per_token=True)
    packed = pk.pack(mx.zeros((PAGES, HEADS, 64, 0)), packing)
    x = mx.random.normal((3, HEADS, REPEATS, 64))

    for product in (pk.page_product, pk.page_product_by_copy):
        got = product(x, packed, packing, index(), transpose=False)
        mx.eval(got)
        assert got.shape == (3, HEADS, REPEATS, 0)


@pytest.mark.parametrize("which", [[], [0], [4], [0, 1, 2, 3, 4], [0, 2, 3], [1, 3], [0, 1, 4]])
@pytest.mark.parametrize("axis", [0, 1])
def test_entries_are_those_of_a_gather(which: list[int], axis: int) -> None:
    array = mx.arange(25).reshape(5, 5)
    assert np.array_equal(entries(array, which, axis), np.take(np.array(array), which, axis))


@pytest.mark.parametrize("cuda", [False, True])
def test_pages_in_some_runs_are_joined_and_on_cuda_gathered(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr(pk, "on_cuda", lambda: cuda)
    numbers = [0, 1, 3, 5, 6]
    array = mx.random.normal((8, HEADS, 4, 64))
    mx.eval(array)
    (taken,) = take((array,), Slots(numbers))
    assert ("Gather" in primitives([taken])) == cuda
    assert mx.array_equal(taken, array[mx.array(numbers)])
    (two,) = take((array,), Slots([0, 1, 3]))
    assert "Gather" not in primitives([two])
