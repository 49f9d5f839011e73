"""CUDA kernels as MLX gets them: lines that include files, instead of the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.kernels import kernel_files, launch
from kvd.worker.attention.kernels.language import CUDA
from kvd.worker.attention.kernels.launch import Launch, append_launch, rotate_launch
from tests.worker.kernels import cases
from tests.worker.kernels.decoding import Step
from tests.worker.kernels.run import run
from tests.worker.kernels.test_append import given as given_append
from tests.worker.kernels.test_rotate import CASES
from tests.worker.kernels.test_rotate import given as given_rotate
from tests.worker.kernels.wrap import wrap

pytestmark = pytest.mark.mlx


def launches() -> list[Launch]:
    step = Step(cases.MATRIX[0])
    split = step.split("cuda")
    (shape,) = split.output_shapes
    append = append_launch(CUDA, given_append(mx.bfloat16, [7, -1, 100], [1, 0, 0]))
    rotate = rotate_launch(CUDA, given_rotate(*CASES["partial"]))
    return [split, step.combine("cuda", mx.zeros(shape)), append, rotate]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Launch]]:
    """The launches with the text that MLX gets."""
    monkeypatch.setattr(kernel_files, "folder", lambda: tmp_path / "kernels")
    found = []

    def kernel(**arguments: Any) -> Any:
        return lambda **_: found.append((arguments["source"], arguments["header"]))

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    launch._kernel.cache_clear()
    long = launches()
    for one in long:
        launch.run(one, CUDA)
    yield [
        replace(one, source=source, header=header)
        for one, (source, header) in zip(long, found, strict=True)
    ]
    launch._kernel.cache_clear()  # the cached kernels are fakes


def test_texts_with_includes_are_short_and_take_the_same_arguments(short: list[Launch]) -> None:
    for one, long in zip(short, launches(), strict=True):
        assert len(one.source) + len(one.header) < 500
        assert wrap(one, "cuda").buffers == wrap(long, "cuda").buffers


@pytest.mark.slow
def test_kernels_with_includes_give_the_same_results(short: list[Launch]) -> None:
    for one, long in zip(short, launches(), strict=True):
        outputs = (run(each, "cuda", races=False) for each in (one, long))
        for got, want in zip(*outputs, strict=True):
            np.testing.assert_array_equal(got, want)
