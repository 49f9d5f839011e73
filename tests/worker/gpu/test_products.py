"""Products of few rows on CUDA: correct, and with the same bits for a row alone and in a batch."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from kvd.worker.artifacts.checks import Checks
from kvd.worker.artifacts.entries import Entries
from kvd.worker.gpu import products

pytestmark = pytest.mark.mlx
cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")


def wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


@cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("inputs", [32, 96, 256, 1024, 4096])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32])
def test_products_match_float32(rows: int, inputs: int, dtype: mx.Dtype) -> None:
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
def test_a_row_of_a_product_has_the_same_bits_alone_and_in_a_batch() -> None:
    x = mx.random.normal((17, 1, 512), key=mx.random.key(1)).astype(mx.bfloat16)
    weight = mx.random.normal((64, 512), key=mx.random.key(2)).astype(mx.bfloat16)
    (together,) = products.multiply(x, weight, (64,))
    alone = [products.multiply(x[row : row + 1], weight, (64,))[0] for row in range(17)]

    assert mx.isfinite(together).all()
    assert mx.array_equal(together, mx.concatenate(alone))


@cuda
def test_the_product_is_found_and_works_in_compiled_functions() -> None:
    product = products.find(mx.bfloat16)
    assert product is not None
    weight = mx.random.normal((48, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    x = mx.random.normal((4, 1, 64), key=mx.random.key(2)).astype(mx.bfloat16)
    traced = mx.compile(lambda one: product(one, weight, (16, 32)))
    for _ in range(2):
        for got, expected in zip(traced(x), product(x, weight, (16, 32)), strict=True):
            assert mx.isfinite(got).all()
            assert mx.array_equal(got, expected)


def test_a_product_that_was_right_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    results = iter([False, True])
    monkeypatch.setattr(products, "_is_right", lambda _dtype: next(results))
    stored = Entries(tmp_path / "kvd" / "checks", 10_000)
    found = []
    for _ in range(4):
        checks = Checks(stored, "key")
        found.append(products.find(mx.bfloat16, checks))
        checks.keep()
    assert found == [None, products.multiply, products.multiply, products.multiply]
    with pytest.raises(StopIteration):
        products.find(mx.float16, Checks(stored, "key"))


@pytest.mark.skipif(mx.cuda.is_available(), reason="tests a machine without CUDA")
def test_without_cuda_no_product_is_found() -> None:
    assert products.find(mx.bfloat16) is None


@pytest.mark.parametrize(
    ("shape", "sizes", "fits"),
    [
        ((8, 1, 64), (32, 16), True),
        ((32, 1, 32), (16,), True),
        ((33, 1, 64), (16,), False),  # MLX computes products of many rows
        ((8, 2, 64), (16,), False),  # a chunk of a prompt
        ((8, 64), (16,), False),
        ((8, 1, 80), (16,), False),
        ((8, 1, 64), (16, 24), False),
    ],
)
def test_accepted_inputs(shape: tuple[int, ...], sizes: tuple[int, ...], *, fits: bool) -> None:
    assert products.fits(mx.zeros(shape), sizes) == fits


def normed(x: mx.array, norm: products.Norm) -> mx.array:
    return wide(x) * mx.rsqrt((wide(x) ** 2).mean(-1, keepdims=True) + norm.eps) * wide(norm.weight)


def assert_close(got: mx.array, want: mx.array, dtype: mx.Dtype) -> None:
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert mx.isfinite(got).all()
    error = float(mx.abs(wide(got) - want).max() / mx.abs(want).max())
    # Unlike the float32 reference, the kernel rounds normed inputs to the dtype.
    assert error <= (2.0**-7 if dtype == mx.bfloat16 else 2.0**-10)


@cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("inputs", [64, 1024])
@pytest.mark.parametrize("rows", [1, 8, 17])
def test_with_norm_bias_and_residual(rows: int, inputs: int, dtype: mx.Dtype) -> None:
    keys = mx.random.split(mx.random.key(rows), 5)
    x = 3 * mx.random.normal((rows, 1, inputs), key=keys[0]).astype(dtype)
    weight = mx.random.normal((96, inputs), key=keys[1]).astype(dtype)
    norm = products.Norm(mx.random.normal((inputs,), key=keys[2]).astype(dtype), 1e-5)
    bias = 9 * mx.random.normal((96,), key=keys[3]).astype(dtype)
    residual = 9 * mx.random.normal((rows, 1, 96), key=keys[4]).astype(dtype)
    plain, after = wide(x) @ wide(weight).T, normed(x, norm) @ wide(weight).T

    parts = products.multiply(x, weight, (32, 16, 48), norm=norm, bias=bias)
    assert_close(mx.concatenate(parts, axis=-1), after + wide(bias), dtype)
    (found,) = products.multiply(x, weight, (96,), residual=residual)
    assert_close(found, plain + wide(residual), dtype)
    (found,) = products.multiply(x, weight, (96,), bias=bias, residual=residual)
    assert_close(found, plain + wide(bias) + wide(residual), dtype)
    gate, up = mx.split(after, 2, axis=-1)
    assert_close(products.multiply_gated(x, weight, norm), gate * mx.sigmoid(gate) * up, dtype)


@cuda
def test_a_row_of_a_gated_product_is_the_same_alone() -> None:
    x = mx.random.normal((9, 1, 256), key=mx.random.key(3)).astype(mx.bfloat16)
    weight = mx.random.normal((64, 256), key=mx.random.key(4)).astype(mx.bfloat16)
    norm = products.Norm(mx.ones((256,), mx.bfloat16), 1e-6)
    assert mx.array_equal(
        products.multiply_gated(x, weight, norm)[4:5],
        products.multiply_gated(x[4:5], weight, norm),
    )


def test_kernels_of_different_texts_have_different_names() -> None:
    """MLX caches compiled kernels by name."""
    how = products._Variant(mx.bfloat16, (64, 32), ("norm",), 1e-6)
    others = [
        products._Variant(mx.float16, (64, 32), ("norm",), 1e-6),
        products._Variant(mx.bfloat16, (64,), ("norm",), 1e-6),
        products._Variant(mx.bfloat16, (64, 32), ("norm",), 1e-5),
        products._Variant(mx.bfloat16, (64, 32), ("norm", "bias"), 1e-6),
        products._Variant(mx.bfloat16, (64, 32), ("residual",)),
        products._Variant(mx.bfloat16, (64,), ("norm",), 1e-6, gated=True),
    ]
    assert len({one.name for one in (how, *others)}) == 1 + len(others)
    assert how.name.replace("_", "").isalnum()
