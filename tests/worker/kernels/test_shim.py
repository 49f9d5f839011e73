"""The shim itself: correct kernels give correct results, in both languages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.worker.kernels.launches import Small, small
from tests.worker.kernels.printed import printed_by_mlx
from tests.worker.kernels.rules import check_rules, threadgroup_memory
from tests.worker.kernels.run import run
from tests.worker.kernels.wrap import wrap

pytestmark = pytest.mark.mlx


METAL_SUM = """
threadgroup float sums[N];
uint i = thread_position_in_grid.x;
float sum = simd_sum(float(x[i]));
if (thread_index_in_simdgroup == 0) {
  sums[simdgroup_index_in_threadgroup] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float all = float(offset);
for (uint k = 0; k < simdgroups_per_threadgroup; ++k) {
  all += sums[k];
}
y[i] = T(B ? all : 0.0f);
"""

CUDA_SUM = """
__shared__ float sums[N];
uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
float sum = static_cast<float>(x[i]);
for (int lanes = 16; lanes > 0; lanes /= 2) {
  sum += __shfl_xor_sync(0xffffffff, sum, lanes);
}
if (threadIdx.x % 32 == 0) {
  sums[threadIdx.x / 32] = sum;
}
__syncthreads();
float all = static_cast<float>(offset[0]);
for (uint32_t k = 0; k < blockDim.x / 32; ++k) {
  all += sums[k];
}
y[i] = static_cast<T>(B ? all : 0.0f);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_threadgroups_sum_with_lanes_shared_memory_and_a_barrier(language, dtype):
    x = mx.random.normal((256,), key=mx.random.key(1)).astype(dtype)
    launch = Small(
        METAL_SUM if language == "metal" else CUDA_SUM,
        [x, mx.array(3)],
        ("x", "offset"),
        output_shapes=[(256,)],
        output_dtypes=[dtype],
        grid=(256, 1, 1),
        threadgroup=(128, 1, 1),
        template=(("T", dtype), ("N", 4), ("B", True)),
    )
    (found,) = run(launch, language)
    expected = np.array(x.astype(mx.float32), np.float64).reshape(2, 128).sum(1) + 3
    rounding = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.reshape(2, 128), np.tile(expected[:, None], 128), rounding)


def test_lanes_exchange_by_xor(language):
    word = {"metal": "simd_shuffle_xor(x[@lane], ushort(5))"}.get(
        language, "__shfl_xor_sync(0xffffffff, x[@lane], 5)"
    )
    (found,) = run(small(language, f"y[@thread] = {word};"), language)
    assert found.tolist() == [float(lane ^ 5) for lane in range(32)]


def test_words_are_loaded_as_vectors_and_read_as_numbers(language):
    words = mx.arange(64, dtype=mx.uint32)
    source = """
    const @device uint2* pairs = (const @device uint2*)x;
    uint2 pair = pairs[@thread];
    y[@thread] = float(pair.x) + 100.0f * float(pair.y);
    """
    (found,) = run(small(language, source, words), language)
    assert found.tolist() == [2 * i + 100.0 * (2 * i + 1) for i in range(32)]


def test_a_kernel_gets_the_shapes_that_its_source_names(language):
    x = mx.zeros((3, 5, 7))
    source = "y[@thread] = float(x_shape[1] * 100 + x_ndim) + float(x_strides[0]) * 1000.0f;"
    (found,) = run(small(language, source, x), language)
    assert set(found.tolist()) == {35503.0}


def test_a_grid_that_threadgroups_do_not_divide_ends_early_on_metal():
    source = "y[thread_position_in_grid.x] = float(threads_per_threadgroup.x);"
    launch = Small(source, [mx.zeros(8)], output_shapes=[(40,)], grid=(40, 1, 1))
    assert run(launch, "metal")[0].tolist() == [32.0] * 32 + [8.0] * 8


def test_denormal_floats_are_zero_on_metal_and_numbers_on_cuda(language):
    x = mx.array([1e-39] * 32, mx.float32)
    (found,) = run(small(language, "y[@thread] = x[@thread] * 2.0f;", x), language)
    assert (found == 0).all() == (language == "metal")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_round_to_nearest_even_as_mlx_does(language, dtype):
    near = np.random.default_rng(0).normal(size=(2048,)).astype(np.float32)
    ties = (np.arange(1, 2049, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32)
    odd = np.array([np.inf, -np.inf, 65519.99, 65520, 3.4e38, 0, -0.0, 6e-8], np.float32)
    x = mx.array(np.concatenate([near, ties, odd]))
    count = x.size
    source = "y[@group * 8 + @thread] = T(x[@group * 8 + @thread]);"
    about = {"output_dtypes": [dtype], "output_shapes": [(count,)], "template": (("T", dtype),)}
    grid = {"grid": (count, 1, 1), "threadgroup": (8, 1, 1)}
    (found,) = run(small(language, source, x, **about, **grid), language)
    np.testing.assert_array_equal(found, np.array(x.astype(dtype).astype(mx.float32)))


def test_unwritten_outputs_are_nan(language):
    (found,) = run(small(language, "if (@thread != 3) { y[@thread] = 1.0f; }"), language)
    assert np.isnan(found).nonzero()[0].tolist() == [3]


# --- what MLX writes around a body


def test_the_signature_is_the_one_that_mlx_writes():
    launch = Small(
        "y[thread_position_in_grid.x] = T(x[0]); z[0] = few_shape[0] + few_ndim + one;\n"
        "z[1] = x_strides[0] + simdgroup_index_in_threadgroup;",
        [mx.zeros((2, 8), mx.bfloat16), mx.zeros((7,), mx.float16), mx.array(1)],
        ("x", "few", "one"),
        ("y", "z"),
        output_shapes=[(32,), (2,)],
        output_dtypes=[mx.bfloat16, mx.uint32],
        template=(("T", mx.bfloat16), ("N", -3), ("B", True), ("C", False), ("U", mx.float16)),
        header="// Above.\n",
    )
    assert wrap(launch, "metal").text + "\n" == printed_by_mlx(launch)


def test_the_signature_without_template_is_the_one_that_mlx_writes():
    launch = Small("y[0] = x[0] + thread_index_in_simdgroup;", [mx.zeros((8,))])
    assert wrap(launch, "metal").text + "\n" == printed_by_mlx(launch)


# --- Metal's rules


def test_threadgroup_memory_is_added_up():
    source = """
    // threadgroup float not_this[4096];
    constexpr int WIDE = N * 2;
    threadgroup float sums[WIDE + 1];
    threadgroup T halves[N][4];
    threadgroup uint2 pairs[3];
    """
    launch = Small(source, [mx.zeros(8)], template=(("T", mx.float16), ("N", 8)))
    check_rules(launch)
    assert threadgroup_memory(launch) == 80 + 64 + 32


@pytest.mark.parametrize(
    ("source", "about", "match"),
    [
        ("threadgroup float sums[8193];", {}, "32784 bytes of threadgroup memory"),
        ("", {"threadgroup": (32, 33, 1)}, "1056 threads"),
        ("double d = 1.0;", {}, "no double"),
        ("const uint* p = x;", {}, "no address space"),
        ("threadgroup float a[4]; threadgroup float* p = a;", {}, "pointer into threadgroup"),
    ],
)
def test_what_metal_refuses_is_reported(source, about, match):
    with pytest.raises(AssertionError, match=match):
        check_rules(Small(source, [mx.zeros(8)], **about))


def test_too_many_buffers_are_reported():
    names = tuple(f"x{i}" for i in range(31))
    with pytest.raises(AssertionError, match="32 buffers"):
        check_rules(Small("", [mx.zeros(8)] * 31, names))
