"""The decode kernels without a GPU, in both languages, compared with dense attention in float64.

`KVD_KERNELS=all` runs every head size with all bits of keys and values and all dtypes, in both
languages (an hour on two cores). A number runs that many random cases.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.fused import OWN_BUFFERS
from kvd.worker.attention.kernels import matrix
from kvd.worker.attention.kernels.language import Language as Primitives
from kvd.worker.attention.kernels.launch import Launch
from kvd.worker.attention.kernels.shape import Shape
from protocol.schemes import BITS
from tests.breadth import part_of
from tests.worker.kernels import build, cases
from tests.worker.kernels.decoding import LANGUAGES, Case, Step
from tests.worker.kernels.printed import printed_by_mlx
from tests.worker.kernels.right import assert_right
from tests.worker.kernels.rules import check_rules
from tests.worker.kernels.run import KernelFault, run
from tests.worker.kernels.wrap import Language, wrap

pytestmark = pytest.mark.mlx

WANTED = os.environ.get("KVD_KERNELS", "20")
CHOSEN = list(cases.all_values()) if WANTED == "all" else cases.values_of(int(WANTED))


def buffers(shape: Shape) -> int:
    """Return how many arrays the larger kernel reads and writes."""
    return OWN_BUFFERS + sum(3 if side.packed else 1 for side in (*shape.keys, *shape.values))


def fits(shape: Shape, language: Primitives) -> bool:
    """Return whether a block fits into shared memory, and the arrays into one kernel."""
    try:
        shape.plan(language)
    except ValueError:
        return False
    return buffers(shape) <= language.most_buffers


def launches(step: Step, language: Language) -> list[Launch]:
    """Return both launches of a step; the second one's input is zero."""
    first = step.split(language)
    (shape,) = first.output_shapes
    return [first, step.combine(language, mx.zeros(shape, mx.float32))]


def attend(step: Step, language: Language, *, races: bool = True) -> np.ndarray:
    (parts,) = run(step.split(language), language, races=races)
    (out,) = run(step.combine(language, parts), language, races=races)
    return out


def looks_for_races(number: int) -> bool:
    """Return whether a case looks for races: only every third does, because that takes long."""
    return WANTED == "all" or number % 3 == 0


@pytest.fixture(scope="module")
def _compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile the kernels of the selected tests in advance, two at a time."""
    items = [one for one in request.session.items if "_compiled" in one.fixturenames]
    chosen = [one.callspec.params["number"] for one in items]
    with ThreadPoolExecutor(2) as pool:
        for number in chosen:
            language = CHOSEN[number]["language"]
            step = Step(cases.case_of(CHOSEN[number], number))
            for launch in launches(step, language):
                races = looks_for_races(number)
                pool.submit(build.library, wrap(launch, language), language, races=races)
        yield
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("number", range(len(CHOSEN)))
def test_kernels_match_dense_attention(number):
    step, language = Step(cases.case_of(CHOSEN[number], number)), CHOSEN[number]["language"]
    assert_right(step, attend(step, language, races=looks_for_races(number)))


@pytest.mark.parametrize("case", cases.MATRIX, ids=lambda case: case.name)
def test_tensor_cores_match_dense_attention(case):
    step = Step(case)
    assert matrix.fits(step.shape(), LANGUAGES["cuda"])
    assert_right(step, attend(step, "cuda", races=case == cases.MATRIX[0] or WANTED == "all"))


@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_scale_that_exceeds_half_floats_gives_no_number(side):
    step = Step(replace(cases.MATRIX[0], rows=((1, 70), (0, 9)), sinks=False))
    assert matrix.fits(step.shape(), LANGUAGES["cuda"])
    (pool,) = step.pools
    words, scales, biases = getattr(pool, side)
    setattr(pool, side, (words, scales * 1e6, biases))
    got = attend(step, "cuda", races=False)

    assert not np.isfinite(got[0]).any()
    assert np.isfinite(got[1]).all()


LONG_CASES = [
    ("metal", ("k8v8", "k4v4")),
    ("metal", ("k5v3",)),
    ("cuda", ("k5v3",)),
    ("cuda", ("k8v8", "k4v4")),
]
"""Every second one has both languages, and both one level and two."""


@pytest.mark.parametrize(("language", "schemes"), part_of(LONG_CASES, 2))
def test_rows_may_be_long_and_very_unequal(language, schemes):
    step = Step(Case(mx.bfloat16, 64, 64, 1, 4, 1, schemes, cases.LONG))
    assert_right(step, attend(step, language, races=False))


def test_every_value_of_each_dimension_is_run_in_both_languages():
    if WANTED == "20":
        assert cases.missing(CHOSEN) == []


@pytest.mark.parametrize("language", ["metal", "cuda"])
def test_a_row_does_not_depend_on_its_batch(language):
    rows = ((1, 70), (6, 127))
    case = Case(dtype=mx.bfloat16, v_dim=96, repeats=2, schemes=("k4v8g32",), rows=rows, sinks=True)
    together = Step(case)
    alone = Step(case)
    alone.case = replace(case, rows=rows[1:])
    alone.queries = together.queries[1:]
    alone.rows = together.rows[1:]
    alone.rows[0, 6:] -= together.rows[0, 7]
    alone.splits = together.splits[2:]
    alone.splits[:, 0] -= 1
    assert (
        attend(together, language, races=False)[1] == attend(alone, language, races=False)[0]
    ).all()


@pytest.mark.parametrize("foreign", ["k16v16", "k6v6g32", "k8v4"])
def test_a_row_does_not_depend_on_the_levels_of_its_batch(foreign):
    shape = Step(Case(mx.bfloat16, 128, 128, schemes=("k4v4", foreign))).shape()
    mixed = replace(shape, schemes=tuple(zip(shape.keys, shape.values, strict=True)))
    alone = replace(mixed, keys=shape.keys[:1], values=shape.values[:1])
    for language in LANGUAGES.values():
        assert mixed.plan(language) == alone.plan(language)
        assert (mixed.tile, mixed.region) == (alone.tile, alone.region)
        assert matrix.fits(mixed, language) == matrix.fits(alone, language)


@pytest.mark.parametrize("part", [0, 1])
def test_mlx_writes_the_same_text_around_the_kernels(part):
    case = Case(dtype=mx.float16, schemes=("k3v5", "k16v16"), sinks=True, padding=1)
    launch = launches(Step(case), "metal")[part]
    assert wrap(launch, "metal").text + "\n" == printed_by_mlx(launch)


def test_every_variant_is_within_the_limits_of_metal():
    """All pairs of head sizes and bits, groups of 32 (the most scales), few and many queries."""
    checked = 0
    for (k_dim, v_dim), bits, (repeats, queries) in product(cases.DIMS, BITS, ((1, 1), (16, 8))):
        case = Case(
            mx.float32, k_dim, v_dim, 1, repeats, queries, (f"k{bits}v{bits}g32",), ((0, 8),)
        )
        step = Step(case)
        assert fits(step.shape(), LANGUAGES["metal"])
        for launch in launches(step, "metal"):
            check_rules(launch)
            checked += 1
        # On CUDA, a thread may use 255 registers, and a block has 65,536.
        for launch in launches(step, "cuda"):
            assert math.prod(launch.threadgroup) <= 256
    assert checked == 2 * 2 * len(cases.DIMS) * len(BITS)


def test_four_levels_are_within_the_limits_of_metal():
    step = Step(Case(schemes=("k8v8", "k6v6", "k4v4", "k2v2"), rows=((4, 8),)))
    shape, launch = step.shape(), step.split("metal")
    assert fits(shape, LANGUAGES["metal"])
    assert buffers(shape) == len(wrap(launch, "metal").buffers) == LANGUAGES["metal"].most_buffers
    check_rules(launch)


def test_what_does_not_fit_into_metals_memory_is_refused():
    case = Case(k_dim=4096, v_dim=256, schemes=("k4v4g32",), rows=((0, 8),))
    assert not fits(Step(case).shape(), LANGUAGES["metal"])


@pytest.mark.skipif(build.find_clang() is None, reason="needs clang++ 17 or newer")
def test_clang_accepts_the_address_spaces_of_the_text():
    for number, values in enumerate(cases.values_of(10)):
        for launch in launches(Step(cases.case_of(values, number)), "metal"):
            assert build.refused_by_clang(wrap(launch, "metal")) == ""
    lost = replace(launch, source=launch.source.replace("device T* to", "T* to"))
    assert "cannot initialize" in build.refused_by_clang(wrap(lost, "metal"))


@pytest.mark.parametrize("barrier", ["SYNC_WARP();", "SYNC_BLOCK();"])
def test_kernels_need_their_barriers(barrier):
    case = Case(schemes=("k4v4",), repeats=4, rows=((3, 65),))
    launch = Step(case).split("metal")
    with pytest.raises(KernelFault, match="race: "):
        run(replace(launch, source=launch.source.replace(barrier, "")), "metal")
