"""Decode steps between the stages of a pass, which a load checks and may refuse."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.cache.model_cache import ModelCache, Stages, Start
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import runner as runners
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from tests.worker.architectures.zoo import build
from tests.worker.core.row_contents import contents_of

pytestmark = pytest.mark.mlx
SETTINGS = CacheSettings((Scheme(8, 8),))
CHUNK = [1 + at % 60 for at in range(150)]


def runner_of(name: str) -> Runner:
    model = build(name)[0]
    return Runner(model, ModelCache(find_layout(model), SETTINGS))


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "gemma3n", "gemma4_text", "hunyuan", "mixtral"]
)
def test_decode_steps_within_a_pass_change_no_bit(name: str) -> None:
    """Some layers read the keys and values of earlier ones, which the pass keeps for them."""
    runner = runner_of(name)
    cache = runner.cache
    runner.pack()
    assert runner.interleave()
    assert not cache.sequences
    plain, staged, *others = [cache.new_row() for _ in range(4)]
    for row in others:
        runner.prefill(row, CHUNK[:70])
    runner.prefill(plain, CHUNK)
    found: list[mx.array] = []

    def step(_: int, start: Start) -> None:
        start()
        found.append(runner.decode([others[0]], mx.array([7])))
        mx.eval(found, cache.arrays())

    runner.prefill_pass([staged], [CHUNK], Stages(0.0, step, lambda: None))

    expected = []
    for _ in found:
        expected.append(runner.decode([others[1]], mx.array([7])))
        mx.eval(expected, cache.arrays())
    assert len(found) == len(cache.stage_ends(0.0))
    assert mx.array_equal(mx.stack(found), mx.stack(expected))
    pairs = zip(contents_of(runner, plain), contents_of(runner, staged), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3n", "hunyuan"])
def test_accelerators_compute_parts_of_a_pass_while_the_host_builds_the_rest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(name)
    runner.pack()
    plain, staged = [runner.cache.new_row() for _ in range(2)]
    runner.prefill(plain, CHUNK)
    starts: list[int] = []
    start = runners._start

    def noted(left: int, begin: Start) -> None:
        starts.append(left)
        start(left, begin)

    monkeypatch.setattr(runners, "on_cpu", lambda: False)
    monkeypatch.setattr(runners, "_start", noted)
    runner.prefill(staged, CHUNK)

    ends = runner.cache.stage_ends(runners.STAGE_ALONE)
    assert starts == [*reversed(range(len(ends)))]
    pairs = zip(contents_of(runner, plain), contents_of(runner, staged), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)


def test_a_model_that_keeps_something_between_its_layers_is_not_interleaved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode step in between overwrites it."""
    runner = runner_of("llama")
    layers = runner.model.model.layers
    plain = type(layers[0])
    kept: dict[str, mx.array] = {}

    class First(plain):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, *rest: Any, **more: Any) -> mx.array:
            kept["x"] = x.sum()
            return plain.__call__(self, x, *rest, **more)

    class Last(plain):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, *rest: Any, **more: Any) -> mx.array:
            return plain.__call__(self, x + kept["x"], *rest, **more)

    monkeypatch.setattr(runner.cache, "stage_ends", lambda _: [1, len(layers)])
    layers[0].__class__, layers[-1].__class__ = First, Last
    assert not runner.interleave()
    assert not runner.interleaves
    assert not runner.cache.sequences


@pytest.mark.parametrize("name", ["mamba2", "deepseek_v3"])
def test_models_that_keep_other_caches_are_not_interleaved(name: str) -> None:
    model = build(name)[0]
    runner = Runner(model, ModelCache(find_layout(model), SETTINGS, batched=False))
    assert not runner.interleave()
