"""A load on CUDA needs few modules that MLX compiles at run time, and a calibration no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from bench.jit.__main__ import REQUESTS, TOGETHER
from bench.jit.recorder import Recorder, keys_of

pytestmark = pytest.mark.mlx
NEEDED = [
    "CompiledSigmoidBroadcastBroadcastMultiplyBroadcastBroadcastMultiply",
    "gather_bfloat16_int32_1",
    "gather_uint32_int32_1",
]
"""A gated MLP, an embedding and reading pages, which every prompt needs."""
REQUEST_PHASES = [*REQUESTS, TOGETHER]
WRITES = ["scatter_bfloat16_int32_Assign_1", "scatter_uint32_int32_Assign_1"]
SAMPLING = ["gather_axis_float32_int32", "scatter_float32_int32_Sum_2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return recorded(tmp_path_factory.mktemp("jit") / "found.json")


def recorded(file: Path, *options: str) -> dict[str, list[str]]:
    """Run in another process, because MLX's functions are replaced before mlx.nn is imported."""
    command = [sys.executable, "-m", "bench.jit", "--shape", "tiny", *options, "--json", str(file)]
    subprocess.run(command, check=True)
    modules: dict[str, list[str]] = json.loads(file.read_text())["modules"]
    return modules


@pytest.mark.slow
def test_a_calibration_needs_only_modules_of_prompts_and_sampling(tmp_path: Path) -> None:
    found = recorded(tmp_path / "found.json", "--calibrate")
    needed = [key for keys in found.values() for key in keys]
    assert sorted(needed) == sorted([*NEEDED, "gather_axis_float32_int32"])
    assert {"weights", "layout", "kernels", "calibration"} <= set(found)


def test_a_load_needs_only_the_modules_of_prompts_sampling_and_pages(
    found: dict[str, list[str]],
) -> None:
    needed = [key for phase in found if phase not in REQUEST_PHASES for key in found[phase]]
    assert sorted(needed) == sorted(NEEDED + SAMPLING + WRITES)
    assert sorted(found["sampling"]) == SAMPLING
    # The check of packed passes already writes pages that are not adjacent.
    assert sorted(found["packed prefill"] + found["writes of pages"]) == WRITES


def test_the_probe_of_layers_needs_no_module_of_its_own(found: dict[str, list[str]]) -> None:
    assert set(found["probe of layers"]) <= set(NEEDED)


def test_no_request_needs_a_module_that_the_load_has_not(found: dict[str, list[str]]) -> None:
    assert {name: found[name] for name in REQUEST_PHASES} == {name: [] for name in REQUEST_PHASES}


def test_every_phase_of_a_load_with_kernels_is_seen(found: dict[str, list[str]]) -> None:
    assert {"weights", "layout", "kernels", "timing", "compiled steps"} <= set(found)


@pytest.mark.parametrize(
    ("build", "keys"),
    [
        (lambda x, at: [x[at]], ["gather_bfloat16_uint32_1"]),
        (lambda x, at: [x[at, at]], ["gather_bfloat16_uint32_2"]),
        (lambda x, at: [x.at[at].add(x[:2])], ["scatter_bfloat16_uint32_Sum_1"]),
        (lambda x, at: [x.at[at].maximum(x[:2])], ["scatter_bfloat16_uint32_Max_1"]),
        (
            lambda x, at: [mx.take_along_axis(x, mx.zeros((4, 1), mx.int32), axis=1)],
            ["gather_axis_bfloat16_int32"],
        ),
        (
            lambda x, at: [mx.put_along_axis(x, mx.zeros((4, 1), mx.int32), x[:, :1], axis=1)],
            ["scatter_axis_bfloat16_int32_Assign"],
        ),
        (lambda x, at: [x.at[:2].add(x[:2])], ["slice_update_Add_bfloat16"]),
        (lambda x, at: [x[1:3] + mx.sort(x, axis=-1)[:2]], []),
    ],
)
def test_keys_are_named_as_mlx_names_its_modules(build, keys: list[str]) -> None:
    arrays = mx.zeros((4, 64), mx.bfloat16), mx.zeros((2,), mx.uint32)
    assert keys_of(build, *arrays) == keys


def test_a_key_counts_for_the_first_phase_that_needs_it() -> None:
    recorder = Recorder()
    array = mx.zeros((4,))
    for phase in ("first", "second"):
        with recorder.phase(phase):
            recorder.called(phase, lambda x: x[mx.array([1])], array)
            with recorder.hidden():
                recorder.called(f"hidden {phase}", lambda x: x[mx.array([1], mx.uint32)], array)
    assert recorder.found == {"first": ["gather_float32_int32_1"], "second": []}
