"""`bench/step`: a small run, and whether the functions that it replaces are restored."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from bench import step
from kvd.worker.native import build
from kvd.worker.serving import seam

pytestmark = pytest.mark.mlx


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_a_run_restores_the_functions_that_it_replaces(tmp_path: Path) -> None:
    before = seam.decode_attention, nn.Linear.__call__, mx.fast.rms_norm
    file, picture = tmp_path / "step.json", tmp_path / "step.svg"
    step.main([
        "--rows", "2", "--tokens", "70", "--steps", "3", "--rounds", "1", "--json", str(file),
        "--plot", str(picture),
    ])  # fmt: skip

    result = json.loads(file.read_text())
    assert [one["path"] for one in result["steps"].values()] == [
        "reference, gathered pages",
        "native",
    ]
    for one in result["steps"].values():
        assert set(step.PARTS) < set(one["ms"])
        assert all(math.isfinite(part) and part >= 0 for part in one["ms"].values())
        assert sum(one["ms"].values()) > 0
    assert set(result["layers"]) == {"many operations", "whole layers"}
    assert all(part > 0 for one in result["layers"].values() for part in one.values())
    assert picture.stat().st_size > 1000
    assert (seam.decode_attention, nn.Linear.__call__, mx.fast.rms_norm) == before


@pytest.mark.parametrize("part", step.PARTS)
def test_free_replaces_one_of_the_functions(part: str) -> None:
    seam.install()
    before = seam.decode_attention, nn.Linear.__call__, mx.fast.rms_norm, step.DecodeStep.append
    with step.free(part):
        inside = (
            seam.decode_attention, nn.Linear.__call__, mx.fast.rms_norm, step.DecodeStep.append,
        )  # fmt: skip
        assert sum(one is not other for one, other in zip(before, inside, strict=True)) == 1
