"""`bench/kv` and `bench/requantize`: small runs, and limits that do not depend on speed."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("mlx.core")

from bench import kv, requantize
from kvd.worker.cache.scheme import Scheme

pytestmark = pytest.mark.mlx


def test_pages_stay_within_their_share_of_fp16() -> None:
    found = {(one["scheme"], one["dtype"]): one["share_of_fp16"] for one in kv.memory()}

    for dtype in ("bfloat16", "float16"):
        assert {name: found[name, dtype] for name in kv.LIMITS} == {
            "k8v8": 0.53125, "k8v4": 0.40625, "k4v4": 0.28125,
        }  # fmt: skip
        assert all(found[name, dtype] <= limit for name, limit in kv.LIMITS.items())
    assert found["k4v4", "float32"] == 0.3125


def test_one_long_row_does_not_lengthen_the_short_rows() -> None:
    lengths = (4096,) + (128,) * 7
    ours = kv.Ours(lengths, Scheme(4, 4)).nbytes
    theirs = kv.Batched(lengths).nbytes

    assert 0 < ours < 0.15 * theirs


def test_the_comparison_runs() -> None:
    result = kv.measure(quick=True)

    assert [one["cache"] for one in result["equal"]] == [
        "kvd k8v8", "kvd k4v4", "mlx-lm BatchKVCache",
        "mlx-lm QuantizedKVCache 8 bits", "mlx-lm QuantizedKVCache 4 bits",
    ]  # fmt: skip
    for one in result["equal"] + result["unequal"]:
        assert math.isfinite(one["step_ms"])
        assert one["step_ms"] > 0
    ours, _, theirs = result["unequal"]
    assert theirs["join_peak_over_before"] > theirs["bytes"]  # mlx-lm copies the batch
    assert 0 < ours["join_peak_over_before"] < theirs["join_peak_over_before"]
    assert kv.table(result["unequal"]).count("\n") == 4


def test_stepping_down_between_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantize, "LAYERS", 2)
    monkeypatch.setattr(requantize, "STEADY_STEPS", 5)
    monkeypatch.setattr(requantize, "UNTOUCHED_TOKENS", 300)
    scratch = 16 * requantize.MIB
    result = requantize.measure(3, 1024, scratch)

    assert result["bytes_after"] == result["bytes_formula"] < result["bytes_before"]
    assert result["peak_over_before"] <= scratch
    assert result["untouched_rows_same_to_the_bit"]
