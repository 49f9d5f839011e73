"""The anthropic package against a real daemon on the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import anthropic
import httpx
import pydantic
import pytest

from tests.http.live import Live
from tests.process.helpers import source

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
ASK = 'Weather?\ncall get_weather {"city": "Paris", "days": 3}'
THINKS = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def ai(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def asked(**fields) -> dict:
    return {"model": "fast", "max_tokens": 400, "messages": HELLO} | fields


def with_tools(**fields) -> dict:
    messages = [{"role": "user", "content": ASK}]
    return (
        asked(tools=[WEATHER], thinking=THINKS, messages=messages, extra_body={"seed": 3}) | fields
    )


def test_an_answer_in_one_piece(ai: anthropic.Anthropic):
    answer = ai.messages.create(**asked(max_tokens=5))
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fast")
    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens >= 1
    assert answer._request_id.startswith("req_")
    assert answer.model_extra["kvd"]["seed"] >= 0


def test_thinking_text_and_a_call(ai: anthropic.Anthropic):
    answer = ai.messages.create(**with_tools())
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use"]
    thinking, _, call = answer.content
    assert thinking.thinking.strip()
    assert thinking.signature.startswith("kvd1.")
    assert (call.name, call.input) == ("get_weather", {"city": "Paris", "days": 3})
    assert call.id.isalnum()
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens_details.thinking_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_is_named(ai: anthropic.Anthropic, streamed):
    fields = asked(max_tokens=40, extra_body={"seed": 4})
    words = ai.messages.create(**fields).content[0].text.split()
    fields |= {"stop_sequences": ["never", words[-1]]}
    if streamed:
        with ai.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
    else:
        answer = ai.messages.create(**fields)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", words[-1])
    assert words[-1] not in "".join(block.text for block in answer.content)


def test_streams_add_up_to_the_answer_in_one_piece(ai: anthropic.Anthropic):
    whole = ai.messages.create(**with_tools())
    with ai.messages.stream(**with_tools()) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert without_ids(streamed) == without_ids(whole)


def without_ids(message) -> dict:
    content = [block.to_dict() | {"id": ""} for block in message.content]
    return {"content": content, "stop": message.stop_reason, "out": message.usage.output_tokens}


@pytest.mark.slow
@pytest.mark.parametrize("event", ["thinking", "text", "input_json"])
def test_a_stream_outlives_its_worker_in_each_kind_of_block(
    ai: anthropic.Anthropic, live: Live, event
):
    live.load(source(tps=60), "mortal-messages")
    fields = with_tools(model="mortal-messages")
    undisturbed = ai.messages.create(**fields)
    killed = False
    with ai.messages.stream(**fields) as stream:
        for one in stream:
            if one.type == event and not killed:
                killed = True
                os.kill(live.worker_pid("mortal-messages"), signal.SIGKILL)
            if one.type == "message_delta":
                assert one.model_extra["kvd"]["resumed"] == 1
        answer = stream.get_final_message()
    assert killed
    assert without_ids(answer) == without_ids(undisturbed)
    assert answer.content[-1].input == {"city": "Paris", "days": 3}


def test_message_start_has_the_true_input_tokens(ai: anthropic.Anthropic):
    count = ai.messages.count_tokens(model="fast", messages=HELLO).input_tokens
    for event in ai.messages.create(**asked(max_tokens=2), stream=True):
        if event.type == "message_start":
            first = event.message.usage
            assert first.input_tokens + first.cache_read_input_tokens == count > 0
        if event.type == "message_delta":
            usage = event.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usage.cache_read_input_tokens == first.cache_read_input_tokens


def test_cache_usage_is_that_of_the_prefix_cache(ai: anthropic.Anthropic):
    system = "A long instruction. " * 40
    first = ai.messages.create(**asked(system=system, max_tokens=1))
    again = ai.messages.create(**asked(system=system, max_tokens=1))
    whole = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens > 500
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == whole
    with ai.messages.stream(**asked(system=system, max_tokens=1)) as stream:
        begin = next(event for event in stream if event.type == "message_start").message.usage
    assert begin.cache_read_input_tokens == again.usage.cache_read_input_tokens
    assert begin.input_tokens == again.usage.input_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_the_client_begins_is_continued(ai: anthropic.Anthropic, streamed):
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]}]
    fields = asked(messages=begun, max_tokens=8)
    count = ai.messages.count_tokens(model="fast", messages=begun).input_tokens
    if streamed:
        with ai.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
    else:
        answer = ai.messages.create(**fields)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == count
    assert not answer.content[0].text.startswith("The answer is")
    with pytest.raises(anthropic.BadRequestError, match="turn thinking off"):
        ai.messages.create(**fields, thinking=THINKS)


def test_tools_count_as_in_the_request(ai: anthropic.Anthropic):
    counted = ai.messages.count_tokens(
        model="fast", messages=HELLO, tools=[WEATHER], system="Be brief."
    )
    used = ai.messages.create(**asked(tools=[WEATHER], system="Be brief.", max_tokens=1)).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    plain = ai.messages.count_tokens(model="fast", messages=HELLO, system="Be brief.")
    assert counted.input_tokens > plain.input_tokens


def test_a_conversation_with_a_tool(ai: anthropic.Anthropic):
    answer = ai.messages.create(**with_tools())
    call = answer.content[-1]
    messages = [
        {"role": "user", "content": ASK},
        answer.to_param(),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    final = ai.messages.create(**with_tools(messages=messages, tool_choice={"type": "none"}))
    assert final.stop_reason == "end_turn"
    assert [block.type for block in final.content if block.type != "thinking"] == ["text"]


def test_the_tool_runner(ai: anthropic.Anthropic):
    asked_for = []

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        asked_for.append((city, days))
        return "Sunny"

    runner = ai.beta.messages.tool_runner(
        model="fast",
        max_tokens=400,
        tools=[get_weather],
        messages=[{"role": "user", "content": ASK}],
        max_iterations=2,
    )
    answers = list(runner)
    assert asked_for[0] == ("Paris", 3)
    assert answers[0].stop_reason == "tool_use"


class City(pydantic.BaseModel):
    name: str
    people: int


def test_parsing_with_pydantic(ai: anthropic.Anthropic):
    answer = ai.messages.parse(**asked(), output_format=City)
    assert isinstance(answer.parsed_output, City)
    with ai.messages.stream(**asked(), output_format=City) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)


async def test_the_async_client_has_many_requests_at_once(live: Live):
    async with anthropic.AsyncAnthropic(base_url=live.url, auth_token="none") as ai:

        async def one(seed: int) -> str:
            fields = asked(max_tokens=20, extra_body={"seed": seed})
            async with ai.messages.stream(**fields) as stream:
                return "".join([text async for text in stream.text_stream])

        texts = await asyncio.gather(*(one(seed % 4) for seed in range(16)))
    assert texts == texts[:4] * 4
    assert len(set(texts)) == 4


def test_errors(ai: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError) as missing:
        ai.messages.create(**asked(model="nope"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id.startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ai.messages.create(**asked(extra_body={"temperature": 99}))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        ai.messages.create(**asked(messages=[{"role": "user", "content": "x" * 300_000}]))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="read only text"):
        ai.messages.create(**asked(messages=[{"role": "user", "content": [image]}]))
    with pytest.raises(anthropic.BadRequestError, match="white space"):
        ai.messages.create(**asked(messages=[*HELLO, {"role": "assistant", "content": "I "}]))


def test_an_unknown_field_is_ignored_and_counted(client: httpx.Client):
    before = ignored(client)
    body = asked(max_tokens=1, of_the_future={"a": 1}, metadata={"user_id": "x"})
    assert client.post("/v1/messages?beta=true", json=body).status_code == 200
    assert ignored(client) == before + 1


def ignored(client: httpx.Client) -> float:
    line = 'kvd_http_ignored_total{path="/v1/messages",what="field"} '
    lines = client.get("/metrics").text.splitlines()
    return sum(float(one.removeprefix(line)) for one in lines if one.startswith(line))


def test_the_events_of_a_stream(client: httpx.Client):
    body = asked(max_tokens=2, stream=True)
    with client.stream("POST", "/v1/messages", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = list(stream.iter_lines())
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    datas = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events == [data["type"] for data in datas]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "[DONE]" not in lines[-1]
