"""A share of the campaign, and that it covers all settings of a request and all architectures."""

from __future__ import annotations

import importlib
import pkgutil
import random
from dataclasses import replace as changed

import mlx_lm.models
import pytest
from msgspec.structs import replace

from protocol.types import Sampling
from protocol.worker import Submit
from tests.worker.architectures.zoo import NOT_RUNNABLE
from tests.worker.gang.campaign import SETTINGS, Single, compare, first_difference, is_rounded
from tests.worker.gang.models import FAMILIES, UNDIVIDED
from tests.worker.gang.traffic import Answer, Traffic, difference, random_request

pytestmark = pytest.mark.mlx

ELSEWHERE = {
    "rid": "the name of the request",
    "chat": "changes the prompt and the grammar, on the leader only",
    "deadline_s": "ends a request by the time",
    "resume": "after the death of a rank: tests/acceptance/test_chaos.py",
    "prompt_reported": "as resume",
    "levels_reported": "as resume",
}
"""Settings of a request that no random request has, and why."""


def test_random_requests_have_all_settings():
    made = [random_request(random.Random(number), number) for number in range(500)]
    for kind, found in ((Submit, made), (Sampling, [one.sampling for one in made])):
        values = {
            name: {repr(getattr(one, name)) for one in found} for name in kind.__struct_fields__
        }
        assert {name for name, each in values.items() if len(each) < 2} == (
            set(ELSEWHERE) - {"rid"} if kind is Submit else set()
        )


def test_all_architectures_that_mlx_lm_divides_take_part():
    divided = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name in NOT_RUNNABLE:
            continue
        loaded = importlib.import_module(f"mlx_lm.models.{module.name}")
        if hasattr(getattr(loaded, "Model", None), "shard"):
            divided.add(module.name)
    assert divided - set(UNDIVIDED) == set(FAMILIES)


@pytest.mark.process
def test_only_a_draw_near_a_tie_counts_as_rounded():
    request = Submit(
        rid="r", tokens=[7, 8, 9], max_tokens=12, sampling=Sampling(temperature=1.0, seed=3)
    )
    sampling = request.sampling
    single = Single("mlx")
    try:
        single.load("demo")

        def answer(**changes) -> Answer:
            asked = replace(request, sampling=replace(sampling, **changes))
            return Traffic(single).run([asked], 0)["r"]

        expected = answer()
        unlikely = (expected.tokens[0][5] + 1) % 4096
        found = answer(logit_bias={unlikely: 30.0})
        at = first_difference(expected.tokens[0], found.tokens[0])
        assert at is not None
        assert is_rounded(single, request, expected, found, 0, nudge=30.0)
        assert not is_rounded(single, request, expected, found, 0)
        for wrong in (answer(seed=4), answer(temperature=0.0), Answer()):
            assert difference(expected, wrong, 0)
            assert not is_rounded(single, request, expected, wrong, 0)
        cut = changed(expected, reasons={0: "stop"})
        assert difference(expected, cut, 0)
        assert not is_rounded(single, request, expected, cut, 0)
    finally:
        single.close()


@pytest.mark.process
@pytest.mark.parametrize("settings", [SETTINGS[1]])
def test_random_requests_get_the_tokens_of_one_process(settings):
    found = compare("demo", 2, 75, 1, settings)
    assert found["different"] == []
    assert len(found["rounded"]) <= 1
    assert found["requests"] == 75
    for name in (
        "requests of several choices",
        "requests that started at a lower level",
        "preemptions",
        "prompts from a checkpoint",
        "cancelled",
        "embeddings",
    ):
        assert found[name] > 0, name
