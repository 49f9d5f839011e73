"""Grouped prefill: one pass over several prompts gives each row the same bits as a pass alone."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import build as build_native
from kvd.worker.native.layers import pack_weights
from kvd.worker.native.step import Library
from kvd.worker.serving import runner as runners
from kvd.worker.serving.probe import find_layout, serve
from kvd.worker.serving.runner import Row, Runner
from protocol.types import Sampling
from tests.worker.architectures.reference import TOKENS
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import prompt_of
from tests.worker.core.row_contents import contents_of

pytestmark = pytest.mark.mlx
SCHEMES = (Scheme(8, 8), Scheme(4, 4))
LENGTHS = (1, 2, 3, 4, 9, 15, 16, 17, 31, 63, 64, 65, 127, 200, 299)


def library() -> ModuleType:
    try:
        return build_native.load()
    except build_native.NotBuiltError:
        pytest.skip("no C++ compiler")


class Counted:
    """A model that records the shape of each pass, ``(rows, tokens)``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[tuple[int, int]] = []

    def __call__(self, tokens: mx.array, **more: Any) -> Any:
        self.passes.append(tokens.shape)
        return self._model(tokens, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def two_runners(
    name: str, library: ModuleType | None = None, settings: CacheSettings | None = None
) -> tuple[Runner, Runner]:
    """Return two runners of one model, each with its own cache."""
    model = build(name)[0]
    if library is not None:
        pack_weights(model, library)
    layout = find_layout(model)
    caches = [ModelCache(layout, settings or CacheSettings(SCHEMES)) for _ in range(2)]
    for cache in caches:
        cache.use(page_product, library and Library(library))
    alone, together = (Runner(model, cache) for cache in caches)
    assert alone.group()
    assert together.group()
    return alone, together


def assert_same(alone: Runner, row: Row, together: Runner, grouped: Row) -> None:
    assert row.length == grouped.length
    contents, grouped_contents = contents_of(alone, row), contents_of(together, grouped)
    for expected, actual in zip(contents, grouped_contents, strict=True):
        assert mx.isfinite(expected).all()
        assert mx.array_equal(expected, actual)


@pytest.mark.parametrize(
    ("name", "native", "settings"),
    [
        ("llama", False, CacheSettings(SCHEMES, max_size=200, keep=4)),
        ("qwen3", False, CacheSettings(SCHEMES, quantized_start=150)),
        ("gemma3_text", False, CacheSettings(SCHEMES)),
        ("qwen3_moe", True, CacheSettings(SCHEMES)),
    ],
    ids=["bounded", "dense start", "windows", "experts"],
)
def test_rows_of_any_length_have_the_same_bits_alone_and_in_a_group(
    name: str, settings: CacheSettings, *, native: bool
) -> None:
    """Chunks alternate with decode steps."""
    alone, together = two_runners(name, library() if native else None, settings)
    draw = random.Random(3)
    for count in (1, 2, 5, 8):
        pairs = [(alone.cache.new_row(), together.cache.new_row()) for _ in range(count)]
        for _ in range(3):
            chunks = [[draw.randrange(60) for _ in range(draw.choice(LENGTHS))] for _ in pairs]
            for (row, _), chunk in zip(pairs, chunks, strict=True):
                alone.prefill(row, chunk)
            together.prefill_group([row for _, row in pairs], chunks)
            for one, other in pairs:
                assert_same(alone, one, together, other)
            found = []
            for side, runner in enumerate((alone, together)):
                logits = runner.decode([pair[side] for pair in pairs], mx.array([7] * count))
                mx.eval(logits, runner.cache.arrays())
                runner.cache.flush()
                check_cache(runner.cache)
                found.append(logits)
            assert mx.isfinite(found[0]).all()
            assert mx.array_equal(*found)
        for side, runner in enumerate((alone, together)):
            for pair in pairs:
                runner.cache.free(pair[side])


def test_logits_of_a_padded_chunk_are_those_of_its_tokens() -> None:
    alone, _ = two_runners("llama")
    one, other = alone.cache.new_row(), alone.cache.new_row()
    scores = alone.score(one, [5, 9, 3])
    alone.prefill(other, [5, 9, 3])

    assert scores.shape[0] == 3
    assert_same(alone, one, alone, other)


@pytest.mark.parametrize("name", ["mamba2", "jamba", "llama4", "deepseek_v3"])
def test_models_that_take_one_row_a_pass_are_not_grouped(name: str) -> None:
    """These models have recurrent states, take one position for all rows, or need rectangles."""
    served = serve(build(name)[0], CacheSettings(SCHEMES), TOKENS)

    assert not served.runner.group()
    assert not served.runner.groups
    row = served.runner.cache.new_row()
    served.runner.prefill(row, [1, 2, 3])
    assert row.length == 3


def test_a_model_with_different_results_in_a_group_is_not_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")[0]
    runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))

    def wrong(self: Any) -> mx.array:
        return mx.zeros((len(self.steps),), mx.int32)

    monkeypatch.setattr("kvd.worker.cache.steps.PrefillGroup.offsets", property(wrong))
    assert not runner.group()
    assert not runner.groups
    assert runner.cache.usage.pages_used == 0
    assert not runner.cache.sequences


def test_on_an_accelerator_models_are_grouped_despite_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router of four experts computes small products, which on a CPU round differently
    depending on the number of rows."""
    model = build("mixtral")[0]
    runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))
    monkeypatch.setattr(runners, "on_cpu", lambda: False)

    assert runner.group()


# The engine.


def submitted(demo: Driver, requests: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    for rid, request in requests.items():
        demo.submit(rid, **request)
    demo.run()
    return {rid: demo.outcomes.pop(rid) for rid in requests}


def test_short_prompts_that_arrive_together_take_one_pass(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = demo.engine._runner
    assert runner.groups
    model = Counted(runner.model)
    monkeypatch.setattr(runner, "model", model)
    requests = {
        f"r{number}": {"prompt": prompt_of(30 + number % 3, number), "max_tokens": 20}
        for number in range(8)
    }
    wanted = {rid: demo.alone(**request) for rid, request in requests.items()}
    assert len(model.passes) == 8
    model.passes.clear()

    assert submitted(demo, requests) == wanted
    assert model.passes == [(8, 31)]


def test_requests_get_the_same_output_alone_and_in_any_group(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some prompts are scored, some requests have several choices or logprobs, and rows decode."""
    model = Counted(demo.engine._runner.model)
    monkeypatch.setattr(demo.engine._runner, "model", model)
    draw = random.Random(11)
    requests: dict[str, dict[str, Any]] = {}
    for number in range(24):
        length = draw.choice((2, 3, 17, 18, 40, 41, 64, 65, 66, 120, 129, 257, 300))
        how = Sampling(temperature=draw.choice((0.0, 0.9)), seed=number)
        more = draw.choice(({}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2}))
        requests[f"r{number}"] = {
            "prompt": prompt_of(length, number),
            "sampling": how,
            "max_tokens": draw.randrange(3, 30),
        } | more
    wanted = {rid: demo.alone(**request) for rid, request in requests.items()}
    model.passes.clear()
    demo.engine._prefix_cache.tree.clear()
    names = list(requests)
    draw.shuffle(names)
    while names or demo.engine.has_work:
        for _ in range(draw.choice((0, 0, 1, 4, 7))):
            if names:
                rid = names.pop()
                demo.submit(rid, **requests[rid])
        if demo.engine.has_work:
            demo.step()

    assert max(rows for rows, _ in model.passes) >= 3
    for rid, outcome in wanted.items():
        assert (rid, demo.outcomes.pop(rid)) == (rid, outcome)


def test_a_cancelled_request_does_not_disturb_its_group(demo: Driver) -> None:
    requests = {
        f"r{number}": {"prompt": prompt_of(40, number), "max_tokens": 10} for number in range(4)
    }
    wanted = {rid: demo.alone(**request) for rid, request in requests.items()}
    for rid, request in requests.items():
        demo.submit(rid, **request)
    demo.engine.cancel("r1")
    demo.step()
    demo.engine.cancel("r2")
    demo.run()

    for rid in ("r0", "r3"):
        assert demo.outcomes[rid] == wanted[rid]
    assert demo.outcomes["r1"].reason == demo.outcomes["r2"].reason == "cancelled"
