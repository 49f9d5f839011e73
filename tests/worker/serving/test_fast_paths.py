"""Each load reports which fast paths it chose, and its own reason for each that it did not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.native import build as native_build
from kvd.worker.serving import describe, kernel_choice, loading, probe, runner
from kvd.worker.serving.runner import Runner
from protocol.types import FastPath
from tests.worker.architectures.zoo import build
from tests.worker.core.driver import Driver
from tests.worker.native.test_whole_layers import SETTINGS, packed
from tests.worker.serving.test_probe import served

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def library() -> ModuleType:
    if native_build.compiler() is None:
        pytest.skip("no C++ compiler")
    return native_build.load()


def paths(found: probe.Served, native: str | None = "on") -> dict[str, FastPath]:
    found.runner.compile()
    found.runner.pack()
    return {one.name: one for one in describe.paths(found, native)}


def test_the_embedded_model_uses_what_this_machine_has(demo: Driver) -> None:
    found = {one.name: one for one in demo.info.paths}
    assert found.keys() >= {"native library", "whole layers", "compiled steps", "packed prefill"}
    assert found["native library"].used == (demo.info.native == "on")
    assert found["whole layers"].used == ("whole layers" in demo.info.attention_path)
    assert found["compiled steps"].used == ("compiled steps" in demo.info.attention_path)
    assert found["packed prefill"].used == ("packed prefill" in demo.info.attention_path)
    assert all(one.used != bool(one.reason) for one in found.values())
    assert found["whole layers"].layers in {0, demo.info.layers}


def test_a_model_with_recurrent_states_declines_what_needs_pages_alone() -> None:
    model, config = build("lfm2")
    found = paths(probe.serve(model, SETTINGS, config["vocab_size"]))
    for name in ("compiled steps", "packed prefill"):
        assert (found[name].cause, found[name].reason) == (
            "model",
            "the model has recurrent states",
        )


def test_steps_and_packed_passes_with_other_results_are_declined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = served("qwen3")
    monkeypatch.setattr(runner, "agree", lambda *_, **__: False)
    declined = paths(found)
    assert declined["compiled steps"].cause == declined["packed prefill"].cause == "results"
    assert not found.runner.compiled
    assert not found.runner.packs


def test_an_error_of_a_traced_step_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> mx.array:
        raise ValueError("cannot be traced\nwith a log")

    found = served("qwen3")
    monkeypatch.setattr(runner.CompiledDecode, "__call__", fails)
    choice = paths(found)["compiled steps"]
    assert (choice.cause, choice.reason) == ("error", "ValueError: cannot be traced")


def test_a_device_that_plans_each_shape_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.padded_sizes, "attention_is_planned", lambda: True)
    monkeypatch.setattr(runner, "on_cpu", lambda: False)
    assert paths(served("qwen3"))["packed prefill"].used


@pytest.mark.parametrize(
    ("name", "cause", "reason"),
    [
        ("ministral3", "model", "takes other arguments than x, mask, cache"),
        ("olmo2", "model", "has other parts than input_layernorm, mlp"),
        ("granite", "results", ""),
    ],
)
def test_layers_say_why_they_are_not_one_operation(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, cause: str, reason: str
) -> None:
    model, config = packed(name, library, monkeypatch, num_hidden_layers=1)
    found = kernel_choice.serve_natively(model, SETTINGS, config["vocab_size"], library)
    choice = paths(found)["whole layers"]
    assert (choice.used, choice.cause) == (False, cause)
    assert choice.reason
    assert reason in choice.reason


def test_without_the_library_its_own_reason_is_reported() -> None:
    found = served("qwen3")
    choice = paths(found, native="no C++ compiler")["native library"]
    assert (choice.used, choice.cause, choice.reason) == (False, "error", "no C++ compiler")
    assert paths(found, native="switched off")["native library"].cause == "switched_off"


def test_paths_that_are_switched_off_say_so(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, "reference")
    model, config = packed("qwen3", library, monkeypatch, num_hidden_layers=1)
    loaded = type("Loaded", (), {"model": model, "vocab_size": config["vocab_size"]})
    found = loading.serve(loaded, SETTINGS, library, lambda *_: None)  # type: ignore[arg-type]
    assert isinstance(found.runner, Runner)
    assert paths(found)["whole layers"].cause == "switched_off"
