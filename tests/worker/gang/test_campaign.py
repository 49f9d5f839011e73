"""A share of the campaign, and that it covers all settings of a request and all architectures."""

from __future__ import annotations

import importlib
import pkgutil
import random

import mlx_lm.models
import pytest

from protocol.types import Alternative, Sampling, TokenLogprob
from protocol.worker import Submit
from tests.worker.architectures.zoo import NOT_RUNNABLE
from tests.worker.gang.campaign import SETTINGS, compare
from tests.worker.gang.models import FAMILIES, UNDIVIDED
from tests.worker.gang.traffic import Answer, logprob_error, random_request

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


def scored(*tokens: int, rest: float = -2.0) -> Answer:
    """Return an answer of one choice; ``rest``: the logprob of the second token."""
    tops = [[Alternative(token, "", -1.0), Alternative(9, "", -2.0)] for token in tokens]
    tops[1][1] = Alternative(9, "", rest)
    each = [TokenLogprob(top[0].token, "", -1.0, top=top) for top in tops]
    return Answer({0: list(tokens)}, scored={0: each})


def test_logprobs_are_compared_up_to_the_first_different_token():
    assert logprob_error(scored(1, 2, 3), scored(1, 2, 3)) == 0
    assert logprob_error(scored(1, 2, 3), scored(1, 2, 3, rest=-2.5)) == 0.5
    assert logprob_error(scored(1, 2, 3), scored(1, 4, 3, rest=-2.5)) == 0.5
    assert logprob_error(scored(1, 2, 3), scored(4, 2, 3, rest=-2.5)) == 0


@pytest.mark.process
@pytest.mark.parametrize("settings", [SETTINGS[1]])
def test_random_requests_get_the_tokens_of_one_process(settings):
    found = compare("demo", 2, 75, 1, settings)
    assert found["different"] == []
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
