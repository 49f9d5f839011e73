"""`bench/attention`: measured paths, no time for a wrong result, and the limits (bars).

A stand-in that runs on the CPU replaces the kernels. `tests/worker/kernels` tests the kernels.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from bench.attention import __main__ as bench
from bench.attention import paths, timing
from bench.attention.bars import bars
from bench.attention.case import Case, Shape
from bench.attention.draw import draw
from bench.attention.plans import LONG, UNEQUAL
from kvd.worker.cache.scheme import Scheme
from tests.worker.attention.stand_in import StandIn
from tests.worker.cache.invariants import check_store

pytestmark = pytest.mark.mlx
SMALL = Shape((130, 64, 640), q_heads=4, kv_heads=2, dim=64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "MOST_SECONDS", 0.01)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda _: 1e9)


def run(path: list[str], file: Path | None = None) -> dict[str, Any]:
    schemes = (Scheme(4, 4),)
    bench.PARTS["bars"] = lambda: iter([(SMALL, schemes, ("fused", "reference", "masked"))])
    options = argparse.Namespace(parts=["bars"], path=path, schemes=None, small=False, json=file)
    return bench.Bench(options, Console(quiet=True)).run()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setitem(bench.PARTS, "bars", bench.PARTS["bars"])
    stand_in = StandIn()
    monkeypatch.setattr(paths, "kernels", lambda: stand_in)
    return stand_in


def test_all_paths_are_measured(kernels: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    result = run(["fused", "reference", "masked", "native"], file)

    assert result["failed"] == []
    assert [row["path"] for row in result["measured"]] == [
        "fused k4v4", "reference k4v4", "native k4v4", "dense, masked",
    ]  # fmt: skip
    for row in result["measured"]:
        assert math.isfinite(row["ms"])
        assert row["ms"] > 0
        assert row["serial_ms"] > 0
        assert row["error"] <= 1e-5
    assert kernels.launches > 2
    assert json.loads(file.read_text()) == result
    console = Console(record=True, width=160)
    bench.show(result, console)
    assert "fused k4v4" in console.export_text()


@pytest.mark.parametrize("error", [1e-4, math.nan])
def test_a_wrong_result_has_no_time(kernels: StandIn, error: float) -> None:
    kernels.error = error
    result = run(["fused", "reference"])

    assert [row["path"] for row in result["measured"]] == ["reference k4v4"]
    (failed,) = result["failed"]
    assert "fused k4v4 is off by" in failed


def test_bytes_are_those_of_the_pages_and_tails_in_use() -> None:
    scheme = Scheme(4, 4)
    case = Case(SMALL, scheme, mx.float32)
    (layer, *_) = case.store.layers
    pages = case.store.pages.used_bytes // len(case.store.layers)
    tails = sum(row.tail_length for row in case.rows) * layer.geometry.dense_bytes(1)

    assert [row.length for row in case.rows] == [131, 65, 641]
    assert case.nbytes == pages + tails
    assert pages == sum(array.nbytes for array in layer.pools[0].arrays())
    check_store(case.store)


def test_on_a_cpu_the_error_names_what_can_run() -> None:
    for arguments in ([], ["--path", "reference"], ["--path", "fused", "--small"]):
        with pytest.raises(bench.NoAcceleratorError, match="--path reference native dense --small"):
            bench.main(arguments)


def test_bars_are_met_or_missed() -> None:
    def row(shape: Shape, scheme: str, ms: float, path: str = "fused") -> dict[str, Any]:
        return {
            "part": "bars", "path": f"{path} {scheme}", "scheme": scheme, "ms": ms,
            "lengths": list(shape.lengths), "shape": shape.name,
        }  # fmt: skip

    measured = [row(LONG, "k4v4", 0.13), row(LONG, "k8v8", 0.4), row(UNEQUAL, "k4v4", 0.03)]
    found = bars([*measured, row(LONG, "k4v4", 9.0, "reference")])

    assert [(bar.value, bar.passed) for bar in found] == [
        (0.13, True), (0.4, False), (pytest.approx(0.03 / 0.13), True),
    ]  # fmt: skip


def test_every_width_is_compared_with_the_rate_of_four_bits() -> None:
    def row(scheme: str, rate: float) -> dict[str, Any]:
        shared = {"part": "bits", "lengths": [64], "shape": "8 x 64", "ms": 1.0}
        return shared | {"path": f"fused {scheme}", "scheme": scheme, "bytes_per_s": rate}

    found = bars([row("k3v3", 1.6e12), row("k4v4", 2e12), row("k8v8", 1.8e12)])

    assert [(bar.value, bar.limit, bar.passed) for bar in found] == [
        (0.8, 0.85, False), (0.9, 0.85, True),
    ]  # fmt: skip
    assert not bars([row("k8v8", 1.8e12)])


def test_the_plot(tmp_path: Path) -> None:
    measured = [
        {
            "part": "length", "path": path, "lengths": [length] * 8,
            "ms": length / slowness, "of_copy": slowness / 1e7,
        }
        for path, slowness in (("fused k4v4", 4e6), ("fused k8v8", 2e6), ("dense", 1e6))
        for length in (512, 2048)
    ]  # fmt: skip
    file = tmp_path / "attention.svg"
    draw({"measured": measured}, file)

    assert all(name in file.read_text() for name in ("fused k4v4", "fused k8v8", "dense"))
