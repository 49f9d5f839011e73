"""Prompt tokens of later passes, for which pools grow at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.worker.core.prompts import Prompts
from kvd.worker.scheduling.request import Chunk, ScheduledRequest


def prompt(rid: str, tokens: int, **more: Any) -> ScheduledRequest:
    request = ScheduledRequest(rid, tokens + 1, 1, (0, 0), 0, None, 1)  # type: ignore[arg-type]
    for name, value in ({"prompt_started": True} | more).items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("others", "later"),
    [
        ([], 3000),
        ([prompt("b", 500)], 3500),
        ([prompt("b", 500, prefilled=200)], 3300),
        ([prompt("b", 500, prompt_started=False)], 3000),  # it may continue a cached prefix
        ([prompt("b", 500, suspended=True)], 3000),
        ([prompt("b", 500, level=1)], 3000),
    ],
)
def test_later_tokens_are_those_of_begun_prompts_on_the_level_of_the_pass(
    others: list[ScheduledRequest], later: int
) -> None:
    requests = {one.rid: one for one in [prompt("a", 5000, prefilled=1000), *others]}
    scheduler = SimpleNamespace(
        find=requests.__getitem__, states=SimpleNamespace(prefilling=requests)
    )
    prompts: Any = SimpleNamespace(_batch=SimpleNamespace(scheduler=scheduler))
    assert Prompts._later_tokens(prompts, [Chunk("a", 1000, 2000)]) == later
    if "b" in requests and requests["b"].level:  # a pass on two levels
        both = [Chunk("a", 1000, 2000), Chunk("b", 0, 100)]
        assert Prompts._later_tokens(prompts, both) == 0
