"""The Responses API with the openai package, on the fake engine.

The engine's answers are scripted (`kvd.worker.fake.script`).
"""

from __future__ import annotations

import os
import signal
from typing import Any

import openai
import pydantic
import pytest

from tests.http.live import Live
from tests.http.responses_api.asked import AGENTS, PATCH, WEATHER
from tests.process.helpers import source

TOOLS: Any = [WEATHER, PATCH, AGENTS]
CALLS = 'call weather {"city": "Paris"}\ncall apply_patch {"input": "a\\n\\"b\\""}'
ASKED: Any = {"model": "fast", "input": CALLS, "tools": TOOLS, "extra_body": {"seed": 3}}


class Trip(pydantic.BaseModel):
    city: str
    days: int


@pytest.fixture
def ai(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_has_reasoning_text_and_calls(ai: openai.OpenAI):
    answer = ai.responses.create(**ASKED)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
    _, _, call, patch = answer.output
    assert (call.name, call.arguments, len(call.call_id)) == ("weather", '{"city": "Paris"}', 9)
    assert (patch.name, patch.input) == ("apply_patch", 'a\n"b"')
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.output_text
    assert (answer.status, answer.error) == ("completed", None)


def test_a_stream_adds_up_to_the_answer_in_one_piece(ai: openai.OpenAI):
    whole = ai.responses.create(**ASKED)
    with ai.responses.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert last.output_text == whole.output_text
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert last.output[2].arguments == whole.output[2].arguments
    assert last.output[3].input == whole.output[3].input


def test_a_pydantic_type_is_parsed(ai: openai.OpenAI):
    answer = ai.responses.parse(model="fast", input="Where to?", text_format=Trip)
    assert isinstance(answer.output_parsed, Trip)
    with ai.responses.stream(model="fast", input="Where to?", text_format=Trip) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Trip)


def test_a_pydantic_tool_has_parsed_arguments(ai: openai.OpenAI):
    answer = ai.responses.parse(
        model="fast",
        input="Where to?",
        tools=[openai.pydantic_function_tool(Trip)],
        tool_choice="required",
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    assert all(isinstance(call.parsed_arguments, Trip) for call in calls)


def test_a_conversation_continues_by_the_previous_response(ai: openai.OpenAI):
    first = ai.responses.create(**ASKED)
    results: Any = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"}
        for item in first.output
        if item.type in {"function_call", "custom_tool_call"}
    ]
    last: Any = {
        **ASKED,
        "input": [{"role": "user", "content": CALLS}, *first.output, *results],
    }
    settings: Any = {**ASKED, "input": results, "previous_response_id": first.id}
    stored, stateless = ai.responses.create(**settings), ai.responses.create(**last)
    assert stored.output_text == stateless.output_text, "both have the same prompt"
    assert stored.usage.input_tokens == stateless.usage.input_tokens
    assert ai.responses.retrieve(stored.id).output_text == stored.output_text
    ai.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(stored.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        ai.responses.create(model="fast", input="More", previous_response_id=stored.id)


def test_stateless_reasoning_comes_back_by_its_encrypted_content(ai: openai.OpenAI):
    first = ai.responses.create(**ASKED, store=False, include=["reasoning.encrypted_content"])
    reasoning = first.output[0]
    assert reasoning.type == "reasoning"
    assert reasoning.encrypted_content
    history: Any = [{"role": "user", "content": "Hi"}, *first.output]
    again: Any = [*history, {"role": "user", "content": "And?"}]
    assert ai.responses.create(model="fast", input=again, store=False).output_text


def test_an_answer_that_reaches_its_limit_is_incomplete(ai: openai.OpenAI):
    answer = ai.responses.create(model="fast", input="Hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 3


def test_errors_have_openais_types(ai: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        ai.responses.create(model="nope", input="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ai.responses.create(model="fast", input="Hi", max_output_tokens=10**6)
    assert long.value.code == "context_length_exceeded"


async def test_the_async_client_streams(live: Live):
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as ai:
        async with ai.responses.stream(**ASKED) as stream:
            numbers = [event.sequence_number async for event in stream]
        assert numbers == list(range(len(numbers)))
        answer = await ai.responses.create(**ASKED)
        assert [item.type for item in answer.output][-1] == "custom_tool_call"


@pytest.mark.slow
def test_a_call_continues_after_the_death_of_its_worker(live: Live, ai: openai.OpenAI):
    """The kill is in the middle of a call's arguments; the stream continues to the byte."""
    live.load(source(tps=60), "mortal-responses")
    text = "call weather " + '{"city": "' + "Paris and " * 40 + '"}'
    asked: Any = {**ASKED, "model": "mortal-responses", "input": text}
    undisturbed = ai.responses.create(**asked).output[-1].arguments
    arguments, killed = "", False
    for event in ai.responses.create(**asked, stream=True):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
            if len(arguments) > 50 and not killed:
                killed = True
                os.kill(live.worker_pid("mortal-responses"), signal.SIGKILL)
    assert killed
    assert arguments == undisturbed
    assert event.type == "response.completed"
    assert event.response.output[-1].arguments == arguments
