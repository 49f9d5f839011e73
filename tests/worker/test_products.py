"""Products of few rows on CUDA: right, and the same alone and in company."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.worker import products

pytestmark = pytest.mark.mlx
cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")


def wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


@cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("inputs", [32, 96, 256, 1024, 4096])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32])
def test_like_float32(rows: int, inputs: int, dtype: mx.Dtype) -> None:
    sizes = (32, 16, 48)
    x = mx.random.normal((rows, 1, inputs), key=mx.random.key(rows)).astype(dtype)
    weight = mx.random.normal((96, inputs), key=mx.random.key(inputs)).astype(dtype)
    want = wide(x) @ wide(weight).T

    parts = products.multiply(x, weight, sizes)
    got = wide(mx.concatenate(parts, axis=-1))

    assert [part.shape for part in parts] == [(rows, 1, size) for size in sizes]
    assert {part.dtype for part in parts} == {dtype}
    assert mx.isfinite(got).all()
    error = float(mx.abs(got - want).max() / mx.abs(want).max())
    assert error <= (2.0**-8 if dtype == mx.bfloat16 else 2.0**-11)


@cuda
def test_the_same_to_the_bit_alone_and_in_company() -> None:
    x = mx.random.normal((17, 1, 512), key=mx.random.key(1)).astype(mx.bfloat16)
    weight = mx.random.normal((64, 512), key=mx.random.key(2)).astype(mx.bfloat16)
    (together,) = products.multiply(x, weight, (64,))
    alone = [products.multiply(x[row : row + 1], weight, (64,))[0] for row in range(17)]

    assert mx.isfinite(together).all()
    assert mx.array_equal(together, mx.concatenate(alone))


@cuda
def test_it_is_found_and_compiles_in_a_trace() -> None:
    product = products.find(mx.bfloat16)
    assert product is not None
    weight = mx.random.normal((48, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    x = mx.random.normal((4, 1, 64), key=mx.random.key(2)).astype(mx.bfloat16)
    traced = mx.compile(lambda one: product(one, weight, (16, 32)))
    for _ in range(2):
        for mine, its in zip(traced(x), product(x, weight, (16, 32)), strict=True):
            assert mx.isfinite(mine).all()
            assert mx.array_equal(mine, its)


@pytest.mark.skipif(mx.cuda.is_available(), reason="what is so without CUDA")
def test_without_cuda_there_is_none() -> None:
    assert products.find(mx.bfloat16) is None


@pytest.mark.parametrize(
    ("shape", "sizes", "fits"),
    [
        ((8, 1, 64), (32, 16), True),
        ((32, 1, 32), (16,), True),
        ((33, 1, 64), (16,), False),  # many rows are MLX's
        ((8, 2, 64), (16,), False),  # a chunk of a prompt
        ((8, 64), (16,), False),
        ((8, 1, 80), (16,), False),
        ((8, 1, 64), (16, 24), False),
    ],
)
def test_what_it_takes(shape: tuple[int, ...], sizes: tuple[int, ...], *, fits: bool) -> None:
    assert products.fits(mx.zeros(shape), sizes) == fits
