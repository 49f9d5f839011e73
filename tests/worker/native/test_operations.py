"""Native norms, RoPE and gates compared with MLX's, on difficult shapes."""

from __future__ import annotations

import math
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations

from kvd.worker.native import operations

pytestmark = pytest.mark.mlx

SIZES = [1, 7, 8, 9, 64, 80, 100, 256]


@pytest.fixture
def functions(library: ModuleType) -> operations._Functions:
    return operations._Functions(library)


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def assert_close(got: mx.array, want: mx.array, bound: float = 2e-6) -> None:
    a, b = np.array(got), np.array(want)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.abs(a - b).max() <= bound * max(1.0, np.abs(b).max())


@pytest.mark.parametrize("size", SIZES)
def test_norms(functions: operations._Functions, size: int) -> None:
    x, weight = normal(3, 5, size), normal(size, seed=1)

    assert_close(functions.rms_norm(x, weight, 1e-6), operations._rms_norm(x, weight, 1e-6))
    assert_close(functions.rms_norm(x, None, 1e-5), operations._rms_norm(x, None, 1e-5))
    transposed = x.swapaxes(0, 1)
    assert_close(
        functions.rms_norm(transposed, weight, 0.1), operations._rms_norm(transposed, weight, 0.1)
    )
    strided = normal(size, 4).T  # not contiguous
    assert_close(
        functions.rms_norm(strided, weight, 0.1), operations._rms_norm(strided, weight, 0.1)
    )


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize(("dim", "dims"), [(64, 64), (64, 32), (80, 80), (96, 24)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotary_positions(
    functions: operations._Functions, dim: int, dims: int, tokens: int, *, traditional: bool
) -> None:
    x = normal(3, tokens, 4, dim).swapaxes(1, 2)
    frequencies = mx.array(np.linspace(1, 1e4, dims // 2), mx.float32)
    for offset in (7, mx.array([0, 5, 12000], mx.int32), mx.array(3)):
        for how in ({"base": 1e6, "scale": 1.0}, {"base": 1e4, "scale": 0.25}):
            same = {"traditional": traditional, "offset": offset, **how}
            assert_close(functions.rope(x, dims, **same), operations._rope(x, dims, **same), 1e-5)
        same = {"traditional": traditional, "base": None, "scale": 1.0, "offset": offset}
        assert_close(
            functions.rope(x, dims, freqs=frequencies, **same),
            operations._rope(x, dims, freqs=frequencies, **same),
            1e-5,
        )


@pytest.mark.parametrize("size", SIZES)
def test_gates(functions: operations._Functions, size: int) -> None:
    gate, x = 30 * normal(2, 3, size), normal(2, 3, size, seed=2)

    assert_close(functions.swiglu(gate, x), operations._swiglu(gate, x))
    both = normal(2, 3, 2 * size)
    halves = mx.split(both, 2, axis=-1)  # views
    assert_close(functions.swiglu(*halves), operations._swiglu(*halves))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_quantized_values_equal_those_of_mlx(
    functions: operations._Functions, bits: int, group: int
) -> None:
    x = normal(3, 64, 128) * mx.exp(4 * normal(3, 64, 1, seed=2))
    x[0, 0], x[0, 1], x[0, 2] = 0.0, 0.75, -1e-9
    x[1, :5, ::7], x[2] = -30.0, mx.abs(x[2])
    channels = (x[:, :, :count].swapaxes(1, 2) for count in (1, 7, 8, 44))
    halves = mx.round(x * 4) / 4  # between two codes
    for one in (x, halves, x.swapaxes(1, 2), x[:, ::2], x[:, :, 1:65].swapaxes(1, 2), *channels):
        got = functions.quantize(one, group_size=group, bits=bits)
        wanted = operations._quantize(one, group_size=group, bits=bits)
        for mine, other in zip(got, wanted, strict=True):
            assert mine.dtype == other.dtype
            assert mx.array_equal(mine, other).item()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_codes_of_groups_without_a_scale_equal_those_of_mlx(
    functions: operations._Functions, bits: int, bad: float
) -> None:
    x = normal(8, 64)
    x[::2, ::5], x[1] = bad, bad  # one scale is NaN, infinite or 0
    for one in (x, mx.contiguous(x.T).T):
        got = functions.quantize(one, group_size=64, bits=bits)
        wanted = operations._quantize(one, group_size=64, bits=bits)
        assert mx.array_equal(got[0], wanted[0]).item()
        for mine, other in zip(got[1:], wanted[1:], strict=True):
            assert mx.array_equal(mine, other, equal_nan=True).item()


@pytest.mark.parametrize("share", [1, 40])
def test_values_are_quantized_on_all_threads(library: ModuleType, share: int) -> None:
    """Many rows are shared by threads, few are not."""
    before = library.threads()
    library.use_threads(2)
    x = normal(4 * share, 64, 64)
    got = library.quantize(x.swapaxes(1, 2), 64, 8)
    wanted = operations._quantize(x.swapaxes(1, 2), group_size=64, bits=8)
    assert all(mx.array_equal(*pair).item() for pair in zip(got, wanted, strict=True))
    library.use_threads(before)


def test_large_gates_saturate(functions: operations._Functions) -> None:
    gate = mx.array([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4]])

    assert_close(functions.swiglu(gate, mx.ones_like(gate)), mx.maximum(gate, 0.0), 1e-30)


def test_non_finite_values_stay(functions: operations._Functions) -> None:
    for bad in (float("nan"), float("inf")):
        x = mx.array([[bad] + [1.0] * 15])
        assert not mx.isfinite(functions.rms_norm(x, None, 0.0)).all().item()
        assert not mx.isfinite(functions.swiglu(x, x)).all().item()
        rope = functions.rope(x[None, None], 16, traditional=False, base=1e4, scale=1.0, offset=1)
        assert not mx.isfinite(rope).all().item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_goes_to_mlx(functions: operations._Functions, dtype: mx.Dtype) -> None:
    x = normal(2, 2, 3, 64, dtype=dtype)
    weight = mx.ones((64,), dtype)

    assert mx.array_equal(
        functions.rms_norm(x, weight, 1e-6), operations._rms_norm(x, weight, 1e-6)
    )
    assert mx.array_equal(functions.swiglu(x, x), operations._swiglu(x, x))
    assert functions.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=3).dtype == dtype


def test_operations_work_in_compiled_functions(library: ModuleType) -> None:
    functions = operations._Functions(library)
    weight = normal(64, seed=1)

    def work(x: mx.array) -> mx.array:
        return functions.swiglu(functions.rms_norm(x * 2, weight, 1e-6), x)

    compiled = mx.compile(work)
    for seed in range(3):
        some = normal(4, 64, seed=seed)
        assert mx.array_equal(compiled(some), work(some))


def test_installed_operations_are_replaced_and_restored(library: ModuleType) -> None:
    """Compiled steps of other tests' models keep the operations that they were traced with."""
    before = mx.fast.rms_norm, mx.fast.rope, activations.swiglu
    with operations.installed(None):
        assert mx.fast.rms_norm is operations._rms_norm
        with operations.installed(library):
            assert mx.fast.rms_norm is not operations._rms_norm
            assert activations.swiglu is not operations._swiglu
            assert mx.quantize is not operations._quantize
        assert mx.fast.rope is operations._rope
        assert activations.swiglu is operations._swiglu
        assert mx.quantize is operations._quantize
    assert (mx.fast.rms_norm, mx.fast.rope, activations.swiglu) == before


def test_accepts_and_refuses_the_same_arguments_as_mlx(
    functions: operations._Functions,
) -> None:
    x = normal(3, 2, 1, 64)
    same = {"traditional": False, "base": 1e4, "scale": 1.0}
    for dims, more in (
        (80, {"offset": 0}),
        (63, {"offset": 0}),
        (64, {"offset": mx.array([1, 2])}),
        (64, {"offset": 0, "freqs": mx.ones((32,))}),
    ):
        with pytest.raises(ValueError, match=r"\[rope\]"):
            functions.rope(x, dims, **(same | more))
    with pytest.raises(ValueError, match="rms_norm"):
        functions.rms_norm(x, mx.ones((32,)), 1e-6)
    for mode in ("affine", "mxfp8"):  # by position, like mlx's
        got, wanted = (
            quantize(x, 32, 8, mode) for quantize in (functions.quantize, operations._quantize)
        )
        assert len(got) == len(wanted)
        assert all(mx.array_equal(*pair).item() for pair in zip(got, wanted, strict=True))
    every_other = mx.arange(6)[::2]
    for offset in (np.int64(5), every_other, mx.broadcast_to(mx.array(7), (3,))):
        got = functions.rope(x, 64, offset=offset, **same)
        assert_close(got, operations._rope(x, 64, offset=mx.array(offset), **same), 1e-5)
    strided = normal(64, 2, seed=4)[:, 0]
    assert_close(functions.rms_norm(x, strided, 0.1), operations._rms_norm(x, strided, 0.1))
    frequencies = mx.broadcast_to(mx.array(3.0), (32,))
    same = {"traditional": True, "base": None, "scale": 1.0, "offset": 3, "freqs": frequencies}
    assert_close(functions.rope(x, 64, **same), operations._rope(x, 64, **same), 1e-5)


def test_very_large_gates(functions: operations._Functions) -> None:
    gate = mx.array([[-1e38, -1e36, 1e38]])

    assert functions.swiglu(gate, mx.ones_like(gate)).tolist() == [[0, 0, gate[0, 2].item()]]
