"""Each kind of error in a kernel is reported with a clear message, in both languages."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.worker.kernels.launches import Small, small
from tests.worker.kernels.run import KernelFault, run
from tests.worker.kernels.wrap import Language

pytestmark = pytest.mark.mlx


def wrong(language: Language, source: str, match: str, x: mx.array | None = None, **about) -> None:
    with pytest.raises(KernelFault, match=match):
        run(small(language, source, x, **about), language)


def test_reading_past_the_end_is_reported(language):
    wrong(
        language,
        "\ny[@thread] = x[@thread + 1];",
        r"reads behind the end of buffer 'x': byte 128, element 32 of 32 .* by thread \(31, 0, 0\)"
        r" of threadgroup \(0, 0, 0\), line 2: y\[",
    )


def test_reading_before_a_beginning_is_reported(language):
    wrong(
        language,
        "int i = int(@thread) - 1; y[@thread] = x[i];",
        r"reads before the beginning of buffer 'x': byte -4, element -1 of 32",
    )


def test_a_stray_index_is_reported_with_its_buffer(language):
    wrong(
        language,
        "y[@thread] = x[@thread * 100000];",
        r"reads behind the end of buffer 'x': byte 400000, element 100000 of 32",
    )


def test_reading_the_few_bytes_past_an_odd_end_is_reported(language):
    wrong(
        language,
        "y[@thread] = float(x[@thread] > 5.0f);",
        "depends on memory that was not written",
        mx.ones((31,), mx.float16),
    )


def test_writing_past_the_end_is_reported(language):
    wrong(
        language,
        "y[@thread + 1] = x[@thread];",
        r"writes behind the end of buffer 'y': byte 128, element 32 of 32",
    )


def test_writing_before_a_beginning_is_reported(language):
    wrong(
        language,
        "int i = int(@thread) - 1; y[i] = 0.0f;",
        r"writes before the beginning of buffer 'y': byte -4",
    )


def test_writing_the_few_bytes_past_an_odd_end_is_reported(language):
    wrong(
        language,
        "y[@thread] = x[@thread];",
        r"writes behind the end of buffer 'y'",
        output_shapes=[(30,)],
    )


def test_writing_to_an_input_is_reported(language):
    wrong(
        language,
        "((@device float*)x)[@thread] = 1.0f; y[@thread] = 1.0f;",
        r"writes to input 'x'",
    )


def test_an_index_outside_of_a_threadgroup_array_is_reported(language):
    source = """
    @shared float sums[16];
    sums[@thread] = 1.0f;
    y[@thread] = 1.0f;
    """
    wrong(language, source, r"index 16 is outside of an array of type .*float.*\[16\].*line 3")


def test_an_index_outside_of_a_local_array_is_reported(language):
    source = "float own[4]; for (int i = 0; i <= int(x[4]); ++i) { own[i] = 1.0f; } y[0] = own[1];"
    wrong(language, source, r"index 4 is outside of an array")


def test_a_barrier_that_some_threads_skip_is_reported(language):
    source = "\nif (@thread < 7) {\n@barrier;\n}\ny[@thread] = 1.0f;"
    wrong(
        language,
        source,
        r"is reached by 7 of 32 threads.*thread \(7, 0, 0\) of .* has ended, line 3",
    )


def test_a_barrier_that_a_simdgroup_skips_is_reported(language):
    source = "if (@thread < 32) { @barrier; } y[@thread] = 1.0f;"
    wide = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)]}
    wrong(language, source, r"is reached by 32 of 64 threads of a threadgroup", **wide)


def test_two_barriers_are_not_one(language):
    source = "if (@thread < 7) {\n@barrier;\n} else {\n@barrier;\n}\ny[@thread] = 1.0f;"
    wrong(language, source, r"is reached by 7 of 32 threads.* waits at .* on line 4")


def test_a_shuffle_that_some_lanes_skip_is_reported(language):
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


def test_a_missing_barrier_is_reported(language):
    wrong(
        language,
        MISSING,
        r"race: (reads|writes to) threadgroup memory that thread \(\d+, 0, 0\) of threadgroup .*"
        r" has (written|read), with no barrier between, .* line (5|6): ",
    )


def test_a_missing_barrier_is_also_found_by_the_order_of_threads(language):
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


def test_two_threads_that_write_the_same_are_reported(language):
    wrong(language, "y[@thread / 2] = 1.0f;", "race: two threads use byte 0 of output 'y'")


def test_threads_may_exchange_values_across_a_barrier(language):
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
def test_unwritten_threadgroup_memory_is_reported(language, read):
    source = f"@shared float sums[32]; if (@lane == 0) sums[0] = 1.0f; @barrier; y[@lane] = {read};"
    wrong(language, source, "depends on memory that was not written")


def test_threadgroup_memory_is_unwritten_in_each_threadgroup(language):
    source = """
    @shared float sums[32];
    if (@group == 0) {
      sums[@thread] = 1.0f;
    }
    @barrier;
    y[@group * 32 + @thread] = sums[@thread];
    """
    wide = {"grid": (64, 1, 1), "output_shapes": [(64,)]}
    wrong(language, source, "depends on memory that was not written", **wide)


def test_a_misaligned_load_is_reported(language):
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


def test_a_shift_by_the_whole_width_is_reported(language):
    wrong(
        language,
        "y[@thread] = float(x[@thread] << @thread + 1);",
        r"shift of type .* by 32",
        mx.arange(32, dtype=mx.uint32),
    )


def test_a_sum_that_overflows_is_reported(language):
    source = "int big = 2147483647 - 30; y[@thread] = float(big + int(@thread));"
    wrong(language, source, "a sum overflows type 'int'")


def test_an_endless_loop_is_reported(language, monkeypatch):
    monkeypatch.setattr("tests.worker.kernels.run._TIMEOUT", 0.3)
    wrong(language, "while (x[0] == 0.0f) { y[0] = 1.0f; }", "does not end")


def test_compiler_errors_are_passed_on(language):
    wrong(language, "y[@thread] = missing;", r"does not compile:\n(?s:.)*missing")


def test_a_float_does_not_become_bfloat_implicitly():
    with pytest.raises(KernelFault, match="does not compile"):
        run(Small("bfloat16_t b = 1.0f; y[0] = b;", [mx.zeros(8)]), "metal")
