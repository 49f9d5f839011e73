"""Layers with packed weights: products match float64, with a row's bits equal in any batch."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from kvd.worker.native import layers
from kvd.worker.serving import seam
from tests.worker.architectures.zoo import build

pytestmark = pytest.mark.mlx

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, library: ModuleType) -> Iterator[int]:
    before = library.threads()
    library.use_threads(request.param)
    yield request.param
    library.use_threads(before)


def linear(outputs: int, inputs: int, dtype: mx.Dtype, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight = mx.random.normal((outputs, inputs), key=mx.random.key(outputs)).astype(dtype)
    return layer


def exact(layer: nn.Linear, x: mx.array) -> np.ndarray:
    weight = np.array(layer.weight.astype(mx.float32)).astype(np.float64)
    found = np.array(x).astype(np.float64) @ weight.T
    return found + np.array(layer.bias) if "bias" in layer else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 64), (100, 37), (768, 256)])
def test_products(
    library: ModuleType, threads: int, outputs: int, inputs: int, dtype: mx.Dtype
) -> None:
    layer = linear(outputs, inputs, dtype)
    packed = layers.PackedLinear(library, layer)
    x = mx.random.normal((70, inputs), key=mx.random.key(7))
    want = exact(layer, x)

    got = packed(x)
    assert np.isfinite(np.array(got)).all()
    assert np.abs(np.array(got) - want).max() <= 1e-5 * np.abs(want).max()
    for rows in (1, 2, 5, 6, 7, 8, 12, 13, 31):
        assert mx.array_equal(packed(x[:rows]), got[:rows])
        assert mx.array_equal(packed(x[-rows:]), got[-rows:])
    assert mx.array_equal(packed(x.reshape(7, 10, inputs)), got.reshape(7, 10, outputs))
    transposed = mx.contiguous(x.T).T
    assert mx.array_equal(packed(transposed), got)


def test_threads_do_not_change_a_bit(library: ModuleType) -> None:
    packed = layers.PackedLinear(library, linear(1000, 512, mx.float16, bias=False))
    x = mx.random.normal((33, 512))
    before, found = library.threads(), []
    for count in (1, 2, 4, 1):
        library.use_threads(count)
        found.append(packed(x))
        mx.eval(found)
    library.use_threads(before)

    assert all(mx.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("half", DTYPES[1:])
def test_float32_weights_that_were_half_floats_are_stored_as_half_floats(
    library: ModuleType, half: mx.Dtype
) -> None:
    plain = linear(48, 64, half, bias=False)
    # A number that the other half type cannot store exactly.
    plain.weight[0, 0] = 1e-30 if half == mx.bfloat16 else 1 + 2**-10
    wide = nn.Linear(64, 48, bias=False)
    wide.weight = plain.weight.astype(mx.float32)
    x = mx.random.normal((3, 64))

    packed = layers.PackedLinear(library, wide)
    assert packed.packed.dtype == half
    assert mx.array_equal(packed.weight, wide.weight)
    assert mx.array_equal(packed(x), layers.PackedLinear(library, plain)(x))


@pytest.mark.parametrize("bad", [1e-30, 1e30, 1.0 + 2**-20, float("nan")])
def test_weights_that_differ_as_half_floats_stay_float32(library: ModuleType, bad: float) -> None:
    layer = linear(16, 32, mx.bfloat16, bias=False)
    layer.weight = layer.weight.astype(mx.float32)
    layer.weight[3, 4] = 1.0000001 if bad in {1e-30, 1e30} else 0.5
    layer.weight[5, 6] = bad

    assert layers.PackedLinear(library, layer).packed.dtype == mx.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings(library: ModuleType, dtype: mx.Dtype) -> None:
    layer = nn.Embedding(100, 48)
    layer.weight = mx.random.normal((100, 48)).astype(dtype)
    packed = layers.PackedEmbedding(library, layer)
    ids = mx.array([[0, 15, 16], [99, 98, 3]])

    assert mx.array_equal(packed(ids), layer(ids).astype(mx.float32))
    assert mx.array_equal(packed.weight, layer.weight.astype(mx.float32))
    x = mx.random.normal((2, 48))
    assert mx.allclose(packed.as_linear(x), x @ layer.weight.astype(mx.float32).T, atol=1e-4)


def test_non_finite_values_propagate(library: ModuleType) -> None:
    packed = layers.PackedLinear(library, linear(32, 64, mx.float16))
    x = mx.zeros((3, 64)).at[1, 5].add(float("nan"))

    finite = mx.isfinite(packed(x)).all(axis=-1)
    assert finite.tolist() == [True, False, True]


def test_a_model_with_tied_embeddings(library: ModuleType) -> None:
    seam.install()
    from mlx_lm.models import qwen3

    arguments = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        rms_norm_eps=1e-6,
        vocab_size=100,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=1e4,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = qwen3.Model(arguments)
    model.set_dtype(mx.float16)
    ids = mx.array([[1, 2, 3, 99]])
    kept = model.parameters()
    model.set_dtype(mx.float32)
    want = model(ids)
    model.update(kept)

    layers.pack_weights(model, library)
    model.set_dtype(mx.float32)
    got = model(ids)

    assert got.dtype == mx.float32
    assert mx.isfinite(got).all()
    assert mx.abs(got - want).max() <= 1e-5 * mx.abs(want).max()
    arrays = layers.packed_arrays(model)
    assert len(arrays) == 1 + 2 * 7
    assert all(array.dtype == mx.float16 for array in arrays)


def test_a_model_that_assigns_to_narrow_weights_runs(library: ModuleType) -> None:
    """Gemma 3n casts the coefficients that mix its 4 streams in every step."""
    model, _ = build("gemma3n")
    ids = mx.array([[1, 2, 3, 50]])
    want = model(ids)
    layers.pack_weights(model, library)
    got = model(ids)

    assert layers.packed_arrays(model)
    assert mx.isfinite(got).all()
    assert mx.abs(got - want).max() <= 1e-4 * mx.abs(want).max()


def test_inputs_of_another_size_are_refused(library: ModuleType) -> None:
    packed = layers.PackedLinear(library, linear(16, 32, mx.float16))
    with pytest.raises(ValueError, match="inputs"):
        packed(mx.ones((2, 33)))
    packed.bias = mx.ones((17,))
    with pytest.raises(ValueError, match="bias"):
        packed(mx.ones((2, 32)))


def test_biases_of_any_layout(library: ModuleType) -> None:
    layer = linear(40, 32, mx.float16)
    layer.bias = mx.random.normal((40, 3)).astype(mx.float16)[:, 1]
    x = mx.random.normal((3, 32))

    got = np.array(layers.PackedLinear(library, layer)(x))
    assert np.abs(got - exact(layer, x)).max() < 1e-4


def test_packing_leaves_no_second_copy(library: ModuleType) -> None:
    layer = nn.Sequential(linear(64, 64, mx.float32), linear(64, 32, mx.float16))
    first, second = layer.layers
    layers.pack_weights(layer, library)

    assert "weight" not in first
    assert "weight" not in second
    assert len(layers.packed_arrays(layer)) == 2


def fused(a: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Sum products over the inputs one after another, each rounded once."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    found = np.zeros((len(a), len(weight)), np.float32)
    columns = weight.tolist()
    for row, inputs in enumerate(a.tolist()):
        for column, weights in enumerate(columns):
            total = 0.0
            for one, other in zip(inputs, weights, strict=True):
                total = fmaf(one, other, total)
            found[row, column] = total
    return found + bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 65), (150, 7), (272, 3)])
def test_products_are_sums_in_order_to_the_bit(
    library: ModuleType, outputs: int, inputs: int, dtype: mx.Dtype
) -> None:
    layer = linear(outputs, inputs, dtype)
    packed = layers.PackedLinear(library, layer)
    x = mx.random.normal((64, inputs), key=mx.random.key(8))
    want = fused(np.array(x), np.array(layer.weight.astype(mx.float32)), np.array(layer.bias))

    for rows in range(1, 65):
        np.testing.assert_array_equal(np.array(packed(x[:rows])), want[:rows])
