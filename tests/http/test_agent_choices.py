"""Chat Completions: tools, reasoning and schemas together with `n`, logprobs and usage."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.http.live import Live
from tests.http.test_agents import ASKED, HELLO, SCHEMA, Collected, named

FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


@pytest.fixture
def ai(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_streamed_choices_have_the_calls_of_the_answer_in_one_piece(ai: openai.OpenAI) -> None:
    wanted = ASKED | {"n": 3, "tool_choice": "required"}
    whole = ai.chat.completions.create(**wanted)
    found = [Collected() for _ in range(3)]
    options: Any = {"include_usage": True}
    chunks = list(ai.chat.completions.create(**wanted, stream=True, stream_options=options))
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index].add(chunk.model_copy(update={"choices": [choice]}))
    for one, choice in zip(found, whole.choices, strict=True):
        assert [call[1:] for call in one.calls.values()] == named(choice.message)
        assert one.end == choice.finish_reason == "tool_calls"
    assert len({call[0] for one in found for call in one.calls.values()}) == sum(
        len(one.calls) for one in found
    ), "every call has an id of its own"
    assert len({json.dumps(named(choice.message)) for choice in whole.choices}) > 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_in_each_of_several_choices(ai: openai.OpenAI, stream: bool) -> None:
    wanted = ASKED | {"n": 4, "tool_choice": "required", "parallel_tool_calls": False}
    if not stream:
        answer = ai.chat.completions.create(**wanted)
        assert [len(named(choice.message)) for choice in answer.choices] == [1] * 4
        return
    indices: dict[int, set[int]] = {number: set() for number in range(4)}
    for chunk in ai.chat.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            indices[choice.index] |= {call.index for call in choice.delta.tool_calls or ()}
    assert indices == {number: {0} for number in range(4)}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "high"},
        {"tools": ASKED["tools"], "tool_choice": "required", "n": 2},
    ],
    ids=["schema", "object", "reasoning", "calls"],
)
def test_logprobs_cover_every_token_whatever_the_answer_is(ai: openai.OpenAI, fields: Any) -> None:
    wanted: Any = {"model": "fast", "messages": HELLO, "seed": 5, "logprobs": True} | fields
    wanted |= {"top_logprobs": 3, "max_tokens": 60}
    answer = ai.chat.completions.create(**wanted)
    tokens = [[one.token for one in choice.logprobs.content] for choice in answer.choices]
    assert sum(map(len, tokens)) == answer.usage.completion_tokens
    for choice in answer.choices:
        assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)
    streamed: list[list[str]] = [[] for _ in tokens]
    for chunk in ai.chat.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += [one.token for one in choice.logprobs.content]
    assert streamed == tokens
