"""Tools, reasoning and structured output with the openai package, on the fake engine.

The engine's answers are scripted (`kvd.worker.fake.script`).
"""

from __future__ import annotations

import asyncio
import enum
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.http.live import Live, asked

HELLO: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
ASKED: Any = {"model": "fast", "messages": HELLO, "tools": [WEATHER, TIME], "seed": 5}


@pytest.fixture
def ai(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def calls_of(message: Any) -> list[tuple[str, str, str]]:
    return [(it.id, it.function.name, it.function.arguments) for it in message.tool_calls]


def named(message: Any) -> list[list[str]]:
    """Return names and arguments; ids differ between requests."""
    return [[it.function.name, it.function.arguments] for it in message.tool_calls]


class Collected:
    """The message of a stream, as a simple client collects it."""

    def __init__(self) -> None:
        self.content = self.reasoning = self.end = ""
        self.calls: dict[int, list[str]] = {}

    def add(self, chunk: Any) -> None:
        for choice in chunk.choices:
            delta = choice.delta
            self.content += delta.content or ""
            self.reasoning += (delta.model_extra or {}).get("reasoning_content", "")
            self.end = choice.finish_reason or self.end
            for call in delta.tool_calls or []:
                if call.index not in self.calls:
                    self.calls[call.index] = [call.id, call.function.name, ""]
                self.calls[call.index][2] += call.function.arguments

    def check(self, answer: Any) -> None:
        message = answer.choices[0].message
        assert (self.content, self.end) == (message.content or "", answer.choices[0].finish_reason)
        assert self.reasoning == message.model_extra["reasoning_content"] != ""
        assert [call[1:] for call in self.calls.values()] == named(message)
        assert all(len(call[0]) == 9 for call in self.calls.values())


def test_a_call_has_arguments_of_its_schema(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(**ASKED, tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.model_extra is not None
    extra = choice.message.model_extra
    assert extra["reasoning"] == extra["reasoning_content"] != ""
    for call_id, name, arguments in calls_of(choice.message):
        assert len(call_id) == 9
        assert set(json.loads(arguments)) == ({"city", "days"} if name == "weather" else set())
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < 9


def test_a_stream_adds_up_to_the_answer_in_one_piece(ai: openai.OpenAI) -> None:
    found = Collected()
    for chunk in ai.chat.completions.create(**ASKED, stream=True):
        found.add(chunk)
    found.check(ai.chat.completions.create(**ASKED))
    assert found.calls


async def test_the_async_client_streams_calls(live: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as ai:

        async def one(seed: int) -> None:
            asked = ASKED | {"seed": seed}
            found = Collected()
            async for chunk in await ai.chat.completions.create(**asked, stream=True):
                found.add(chunk)
            found.check(await ai.chat.completions.create(**asked))

        await asyncio.gather(*(one(seed) for seed in range(8)))


def test_the_stream_helper_reports_calls_as_events(ai: openai.OpenAI) -> None:
    asked = ASKED | {"tool_choice": "required"}
    with ai.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    ended = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    expected = named(ai.chat.completions.create(**asked).choices[0].message)
    assert [[it.name, it.arguments] for it in ended] == expected
    assert named(final.choices[0].message) == expected
    assert final.choices[0].finish_reason == "tool_calls"


async def test_the_async_stream_helper(live: Live) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as ai,
        ai.chat.completions.stream(**ASKED, tool_choice="required") as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Step(pydantic.BaseModel):
    title: str
    seconds: int | None


class Plan(pydantic.BaseModel):
    """A plan for the day."""

    steps: list[Step]
    mood: Mood
    done: bool


def test_an_answer_is_parsed_into_a_pydantic_model(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.parse(model="fast", messages=HELLO, response_format=Plan, seed=2)
    plan = answer.choices[0].message.parsed
    assert isinstance(plan, Plan)
    assert plan.steps
    with ai.chat.completions.stream(
        model="fast", messages=HELLO, response_format=Plan, seed=2
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == plan


def test_arguments_are_parsed_into_a_pydantic_model(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.parse(
        model="fast",
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Plan, name="plan")],
        tool_choice={"type": "function", "function": {"name": "plan"}},
        seed=3,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Plan) for call in calls)


def test_a_conversation_goes_on_with_the_result_of_a_call(ai: openai.OpenAI) -> None:
    first = ai.chat.completions.create(**ASKED, tool_choice="required").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": "rain"}
        for call_id, _, _ in calls_of(first)
    ]
    messages = [*HELLO, first.model_dump(), *results]
    answer = ai.chat.completions.create(**ASKED | {"messages": messages}).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content
    assert answer.message.tool_calls is None


def test_one_call_at_a_time(ai: openai.OpenAI) -> None:
    asked = ASKED | {"tool_choice": "required"}
    several = [ai.chat.completions.create(**asked | {"seed": seed}) for seed in range(6)]
    counts = {len(answer.choices[0].message.tool_calls or ()) for answer in several}
    assert counts == {1, 2}
    for seed in range(6):
        one = ai.chat.completions.create(**asked | {"seed": seed}, parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls or ()) == 1


def test_no_calls_and_no_reasoning_if_asked_so(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        **ASKED,
        tool_choice="none",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    message = answer.choices[0].message
    assert message.tool_calls is None
    assert "reasoning" not in (message.model_extra or {})


def test_a_truncated_call_ends_with_length(ai: openai.OpenAI) -> None:
    asked = ASKED | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    whole = ai.chat.completions.create(**asked).choices[0].message
    cut = ai.chat.completions.create(**asked, max_tokens=9).choices[0]
    assert cut.finish_reason == "length"
    (name, arguments), *_ = named(cut.message)
    assert name == "weather"
    assert named(whole)[0][1].startswith(arguments)
    assert len(arguments) < len(named(whole)[0][1])


def test_logprobs_of_all_tokens_come_with_calls(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content or ()) == answer.usage.completion_tokens
    streamed = [
        one
        for chunk in ai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2, stream=True)
        for it in chunk.choices
        if it.logprobs is not None
        for one in it.logprobs.content or ()
    ]
    assert [one.token for one in streamed] == [one.token for one in choice.logprobs.content or ()]


def test_models_advertise_their_context_and_what_they_can_do(ai: openai.OpenAI) -> None:
    extra = ai.models.retrieve("fast").model_extra
    assert extra is not None
    assert extra["context_length"] == extra["max_model_len"] == extra["kvd"]["context_length"]
    assert extra["kvd"]["chat"]["tools"]


def test_effort_values_of_other_servers_are_accepted(client: httpx.Client) -> None:
    # zed#63216, mlxstudio#100: an effort that the template does not know gave 400.
    for fields in (
        {"reasoning_effort": "xhigh"},
        {"reasoning_effort": "minimal"},
        {"reasoning": {"effort": "max", "max_tokens": 100, "exclude": False}},
    ):
        answer = client.post("/v1/chat/completions", json=asked(max_tokens=9, **fields))
        assert answer.status_code == 200, answer.text


def test_content_is_always_a_key_of_the_message(client: httpx.Client) -> None:
    # cline#12132
    body = asked(tools=[WEATHER], tool_choice="required")
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert "content" in message
    assert message["content"] is None
