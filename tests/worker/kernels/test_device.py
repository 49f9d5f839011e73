"""The kernels on this machine's GPU, if it has one: cases of the other tests, and long rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.artifacts import modules
from kvd.worker.attention.kernels.language import CUDA, Language
from kvd.worker.attention.kernels.launch import (
    Launch,
    append_launch,
    find_language,
    rotate_launch,
    run,
)
from tests.worker.kernels import cases, test_append, test_prefill, test_rotate
from tests.worker.kernels.decoding import LANGUAGES, Case, Step
from tests.worker.kernels.right import assert_right

LANGUAGE = find_language()
pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(LANGUAGE is None, reason="needs a GPU that the kernels support"),
]

CHOSEN = cases.values_of(60)


def attend(step: Step) -> np.ndarray:
    (language,) = (name for name, one in LANGUAGES.items() if one is LANGUAGE)
    (parts,) = run(step.split(language), LANGUAGES[language])
    (out,) = run(step.combine(language, parts), LANGUAGES[language])
    return np.array(out.astype(mx.float32))


def made(make: Callable[[Language, Any], Launch], given: Any) -> list[np.ndarray]:
    assert LANGUAGE is not None
    found = run(make(LANGUAGE, given), LANGUAGE)
    # Packed numbers stay integers.
    return [np.array(one if one.dtype == mx.uint32 else one.astype(mx.float32)) for one in found]


@pytest.mark.parametrize("number", range(len(CHOSEN)))
def test_kernels_match_dense_attention(number: int) -> None:
    step = Step(cases.case_of(CHOSEN[number], number))
    assert_right(step, attend(step))


@pytest.mark.parametrize("case", cases.MATRIX, ids=lambda case: case.name)
def test_tensor_cores_match_dense_attention(case: Case) -> None:
    step = Step(case)
    assert_right(step, attend(step))


@pytest.mark.parametrize("schemes", [("k4v4",), ("k8v8",), ("k8v8", "k8v4", "k4v4"), ("k16v16",)])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
def test_rows_may_be_long_and_very_unequal(dtype: mx.Dtype, schemes: tuple[str, ...]) -> None:
    step = Step(Case(dtype, 128, 128, 2, 4, 1, schemes, cases.LONG))
    assert_right(step, attend(step))


@pytest.mark.parametrize("case", test_rotate.CASES.values(), ids=test_rotate.CASES.keys())
def test_rotated_queries_and_keys_match_float64(case: tuple[Any, ...]) -> None:
    test_rotate.check(partial(made, rotate_launch), *case)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("token_places", "token_rows"), test_append.PLACES, ids=test_append.NAMES)
def test_each_tail_gets_its_token_and_is_otherwise_unchanged(
    dtype: mx.Dtype, token_places: list[int], token_rows: list[int] | None
) -> None:
    test_append.check(partial(made, append_launch), dtype, token_places, token_rows)


@pytest.mark.parametrize("case", test_prefill.CASES.values(), ids=test_prefill.CASES.keys())
def test_pages_of_a_pass_are_right(case: test_prefill.Case) -> None:
    test_prefill.check_pack(made, case, like_mlx=False)
    test_prefill.check_precision(made, case)
    test_prefill.check_unpack(made, [case])


def test_dense_pages_of_several_levels() -> None:
    test_prefill.check_unpack(made, test_prefill.LEVELS)


@pytest.mark.parametrize("case", test_prefill.SPREAD.values(), ids=test_prefill.SPREAD.keys())
def test_spread_vectors_match_float64(case: tuple[Any, ...]) -> None:
    test_prefill.check_spread(made, *case)


def test_tails_are_written() -> None:
    test_prefill.check_tails(made, mx.bfloat16)


@pytest.mark.skipif(LANGUAGE is not CUDA, reason="there is a kernel for CUDA only")
@pytest.mark.parametrize("shape", test_prefill.ATTENDED.values(), ids=test_prefill.ATTENDED.keys())
def test_chunks_attend_like_float64(shape: test_prefill.Shape) -> None:
    test_prefill.check_attend(made, shape)


@pytest.mark.skipif(LANGUAGE is not CUDA, reason="there is a kernel for CUDA only")
def test_splits_of_chunks_are_combined() -> None:
    test_prefill.check_splits(made)


def test_modules_compiled_by_kvd_are_the_ones_that_run(tmp_path: Path) -> None:
    """In processes of their own, because MLX reads its folder's name once."""
    if not mx.cuda.is_available():
        pytest.skip("only CUDA kernels are compiled by kvd")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop(modules.FOLDER_VARIABLE, None)
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.worker.kernels.device_modules"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = counts
    assert first["right"]
    assert second["right"]
    assert first["compiled"] == first["kernels"] > 5
    assert second["compiled"] == 0
    assert second["seconds"] < first["seconds"]
    assert [one["marked"] for one in counts] == [7.0, 7.0], "MLX did not read kvd's module"
