"""The machinery itself: right kernels run, each kind of wrong one is told, in both languages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.launches import Small
from tests.metal.printed import printed_by_mlx
from tests.metal.rules import check_rules, threadgroup_memory
from tests.metal.run import KernelFault, run
from tests.metal.wrap import Language, wrap

pytestmark = pytest.mark.mlx

# The two languages differ in these words; the rest of the kernels below is C++.
WORDS: dict[Language, dict[str, str]] = {
    "metal": {
        "@shared": "threadgroup",
        "@barrier": "threadgroup_barrier(mem_flags::mem_threadgroup)",
        "@thread": "thread_index_in_threadgroup",
        "@lane": "thread_index_in_simdgroup",
        "@group": "threadgroup_position_in_grid.x",
        "@device": "device",
    },
    "cuda": {
        "@shared": "__shared__",
        "@barrier": "__syncthreads()",
        "@thread": "threadIdx.x",
        "@lane": "(threadIdx.x % 32)",
        "@group": "blockIdx.x",
        "@device": "",
    },
}


@pytest.fixture(params=["metal", "cuda"])
def language(request: pytest.FixtureRequest) -> Language:
    return request.param


def small(language: Language, source: str, x: mx.array | None = None, **about) -> Small:
    for word, meaning in WORDS[language].items():
        source = source.replace(word, meaning)
    x = mx.arange(32, dtype=mx.float32) if x is None else x
    return Small(source, [x], **about)


def wrong(language: Language, source: str, match: str, x: mx.array | None = None, **about) -> None:
    with pytest.raises(KernelFault, match=match):
        run(small(language, source, x, **about), language)


# --- right kernels


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
    wanted = np.array(x.astype(mx.float32), np.float64).reshape(2, 128).sum(1) + 3
    rounding = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.reshape(2, 128), np.tile(wanted[:, None], 128), rounding)


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


def test_shapes_come_where_the_source_names_them(language):
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


def test_what_is_not_written_comes_back_as_nan(language):
    (found,) = run(small(language, "if (@thread != 3) { y[@thread] = 1.0f; }"), language)
    assert np.isnan(found).nonzero()[0].tolist() == [3]


# --- wrong kernels


def test_reading_behind_an_end_is_told(language):
    wrong(
        language,
        "\ny[@thread] = x[@thread + 1];",
        r"reads behind the end of buffer 'x': byte 128, element 32 of 32 .* by thread \(31, 0, 0\)"
        r" of threadgroup \(0, 0, 0\), line 2: y\[",
    )


def test_reading_before_a_beginning_is_told(language):
    wrong(
        language,
        "int i = int(@thread) - 1; y[@thread] = x[i];",
        r"reads before the beginning of buffer 'x': byte -4, element -1 of 32",
    )


def test_a_stray_index_is_told_with_its_buffer(language):
    wrong(
        language,
        "y[@thread] = x[@thread * 100000];",
        r"reads behind the end of buffer 'x': byte 400000, element 100000 of 32",
    )


def test_reading_the_few_bytes_behind_an_odd_end_is_told(language):
    wrong(
        language,
        "y[@thread] = float(x[@thread] > 5.0f);",
        "depends on memory that nobody has written",
        mx.ones((31,), mx.float16),
    )


def test_writing_behind_an_end_is_told(language):
    wrong(
        language,
        "y[@thread + 1] = x[@thread];",
        r"writes behind the end of buffer 'y': byte 128, element 32 of 32",
    )


def test_writing_before_a_beginning_is_told(language):
    wrong(
        language,
        "int i = int(@thread) - 1; y[i] = 0.0f;",
        r"writes before the beginning of buffer 'y': byte -4",
    )


def test_writing_the_few_bytes_behind_an_odd_end_is_told(language):
    wrong(
        language,
        "y[@thread] = x[@thread];",
        r"writes behind the end of buffer 'y'",
        output_shapes=[(30,)],
    )


def test_writing_to_an_input_is_told(language):
    wrong(
        language,
        "((@device float*)x)[@thread] = 1.0f; y[@thread] = 1.0f;",
        r"writes to input 'x'",
    )


def test_an_index_outside_of_a_threadgroup_array_is_told(language):
    source = """
    @shared float sums[16];
    sums[@thread] = 1.0f;
    y[@thread] = 1.0f;
    """
    wrong(language, source, r"index 16 is outside of an array of type .*float.*\[16\].*line 3")


def test_an_index_outside_of_a_local_array_is_told(language):
    source = "float own[4]; for (int i = 0; i <= int(x[4]); ++i) { own[i] = 1.0f; } y[0] = own[1];"
    wrong(language, source, r"index 4 is outside of an array")


def test_a_barrier_that_some_threads_pass_by_is_told(language):
    source = "\nif (@thread < 7) {\n@barrier;\n}\ny[@thread] = 1.0f;"
    wrong(
        language,
        source,
        r"is reached by 7 of 32 threads.*thread \(7, 0, 0\) of .* has ended, line 3",
    )


def test_a_barrier_that_a_simdgroup_passes_by_is_told(language):
    source = "if (@thread < 32) { @barrier; } y[@thread] = 1.0f;"
    wide = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)]}
    wrong(language, source, r"is reached by 32 of 64 threads of a threadgroup", **wide)


def test_two_barriers_are_not_one(language):
    source = "if (@thread < 7) {\n@barrier;\n} else {\n@barrier;\n}\ny[@thread] = 1.0f;"
    wrong(language, source, r"is reached by 7 of 32 threads.* waits at .* on line 4")


def test_a_shuffle_that_some_lanes_pass_by_is_told(language):
    word = {"metal": "simd_max(x[0])"}.get(language, "__shfl_xor_sync(0xffffffff, x[0], 1)")
    source = f"y[@thread] = 0.0f; if (@thread > 0) {{ y[@thread] = {word}; }}"
    wrong(language, source, r"(simd_max|__shfl_xor_sync) is reached by 31 of 32 threads")


MISSING = """
@shared float sums[32];
sums[@thread] = 0.0f;
@barrier;
sums[@thread] = x[@thread];
y[@thread] = sums[31 - @thread];
"""


def test_a_missing_barrier_is_told(language):
    wrong(
        language,
        MISSING,
        r"race: (reads|writes to) threadgroup memory that thread \(\d+, 0, 0\) of threadgroup .*"
        r" has (written|read), with no barrier between, .* line (5|6): ",
    )


def test_a_missing_barrier_is_told_by_the_order_too(language):
    with pytest.raises(KernelFault, match="depends on the order in which threads run: a barrier"):
        run(small(language, MISSING), language, races=False)


def test_a_shuffle_is_no_barrier(language):
    word = {"metal": "simd_sum(x[0])"}.get(language, "__shfl_xor_sync(0xffffffff, x[0], 1)")
    source = f"""
    @shared float sums[32];
    sums[@thread] = x[@thread];
    float other = {word};
    y[@thread] = sums[31 - @thread] + other;
    """
    run(small(language, source), language, races=False)
    wrong(language, source, "race: reads threadgroup memory that thread .* has written.* line 5")


def test_two_threads_that_write_the_same_are_told(language):
    wrong(language, "y[@thread / 2] = 1.0f;", "race: two threads use byte 0 of output 'y'")


def test_a_barrier_between_makes_it_right(language):
    source = """
    @shared float sums[32];
    sums[@thread] = x[@thread];
    @barrier;
    y[@thread] = sums[31 - @thread];
    """
    (found,) = run(small(language, source), language)
    assert found.tolist() == list(range(31, -1, -1))


def test_simdgroups_need_a_barrier_between_them(language):
    word = {"metal": "simdgroup_barrier(mem_flags::mem_threadgroup)"}.get(language, "__syncwarp()")
    source = f"""
    @shared float sums[64];
    sums[@thread] = 0.0f;
    @barrier;
    sums[@thread] = 1.0f;
    {word};
    y[@thread] = sums[63 - @thread];
    """
    wide = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)]}
    wrong(language, source, "race: ", **wide)


@pytest.mark.parametrize("read", ["sums[@lane]", "max(sums[@lane], 1.0f)"])
def test_threadgroup_memory_that_nobody_has_written_is_told(language, read):
    source = f"@shared float sums[32]; if (@lane == 0) sums[0] = 1.0f; @barrier; y[@lane] = {read};"
    wrong(language, source, "depends on memory that nobody has written")


def test_threadgroups_leave_each_other_nothing(language):
    source = """
    @shared float sums[32];
    if (@group == 0) {
      sums[@thread] = 1.0f;
    }
    @barrier;
    y[@group * 32 + @thread] = sums[@thread];
    """
    wide = {"grid": (64, 1, 1), "output_shapes": [(64,)]}
    wrong(language, source, "depends on memory that nobody has written", **wide)


def test_a_misaligned_load_is_told(language):
    source = """
    const @device uint2* pairs = (const @device uint2*)(x + 1);
    y[@thread] = float(pairs[@thread / 4].x);
    """
    wrong(
        language,
        source,
        r"misaligned access in buffer 'x', byte 4: type .*needs a multiple of 8.*line 3",
        mx.arange(32, dtype=mx.uint32),
    )


def test_a_shift_by_the_whole_width_is_told(language):
    wrong(
        language,
        "y[@thread] = float(x[@thread] << @thread + 1);",
        r"shift of type .* by 32",
        mx.arange(32, dtype=mx.uint32),
    )


def test_a_sum_that_overflows_is_told(language):
    source = "int big = 2147483647 - 30; y[@thread] = float(big + int(@thread));"
    wrong(language, source, "a sum overflows type 'int'")


def test_a_loop_without_progress_is_no_hang(language, monkeypatch):
    monkeypatch.setattr("tests.metal.run._TIMEOUT", 0.3)
    wrong(language, "while (x[0] == 0.0f) { y[0] = 1.0f; }", "does not end")


def test_what_the_compiler_says_is_passed_on(language):
    wrong(language, "y[@thread] = missing;", r"does not compile:\n(?s:.)*missing")


def test_bfloat_takes_no_float_by_itself():
    with pytest.raises(KernelFault, match="does not compile"):
        run(Small("bfloat16_t b = 1.0f; y[0] = b;", [mx.zeros(8)]), "metal")


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
def test_what_metal_would_refuse_is_told(source, about, match):
    with pytest.raises(AssertionError, match=match):
        check_rules(Small(source, [mx.zeros(8)], **about))


def test_too_many_buffers_are_told():
    names = tuple(f"x{i}" for i in range(31))
    with pytest.raises(AssertionError, match="32 buffers"):
        check_rules(Small("", [mx.zeros(8)] * 31, names))
