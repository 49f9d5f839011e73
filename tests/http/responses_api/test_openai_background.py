"""Stored and background responses with the openai package, on the fake engine."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.http.live import Live
from tests.process.helpers import wait_for

SLOW: Any = {"model": "slow", "input": "Hi", "max_output_tokens": 400, "background": True}


@pytest.fixture
def ai(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_background_response_is_polled_until_its_end(ai: openai.OpenAI):
    made = ai.responses.create(model="fast", input="Hi", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    polled = made

    def is_over() -> bool:
        nonlocal polled
        polled = ai.responses.retrieve(made.id)
        return polled.status not in {"queued", "in_progress"}

    wait_for("the response is over", is_over)
    assert polled.status == "completed"
    assert polled.output_text
    assert polled.usage.output_tokens


def test_a_cancelled_response_frees_its_worker(live: Live, ai: openai.OpenAI):
    made = ai.responses.create(**SLOW)
    wait_for("it runs", lambda: live.running("slow"))
    assert ai.responses.cancel(made.id).status == "cancelled"
    live.wait_idle("slow")
    assert ai.responses.retrieve(made.id).status == "cancelled"


def test_a_stream_continues_after_a_sequence_number(ai: openai.OpenAI):
    asked: Any = {"model": "fast", "input": "Hi", "background": True}
    with ai.responses.create(**asked, stream=True) as stream:
        first = [event for event, _ in zip(stream, range(6), strict=False)]
    name, last = first[0].response.id, first[-1].sequence_number
    rest = list(ai.responses.retrieve(name, stream=True, starting_after=last))
    assert [event.sequence_number for event in first + rest] == list(range(last + len(rest) + 1))
    assert rest[-1].type == "response.completed"
    with ai.responses.stream(response_id=name, starting_after=last) as helper:
        assert [event.type for event in helper] == [event.type for event in rest]


def test_input_items_are_paged(ai: openai.OpenAI):
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = ai.responses.create(model="fast", input=items, max_output_tokens=1)
    listed = ai.responses.input_items.list(made.id, limit=2, order="asc")
    assert [item.content[0].text for item in listed.data] == ["0", "1"]
    assert [item.content[0].text for item in listed] == ["0", "1", "2", "3", "4"]
    ai.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.input_items.list(made.id)


def test_logprobs_are_those_of_the_text(ai: openai.OpenAI):
    asked: Any = {"model": "fast", "input": "Hi", "max_output_tokens": 12}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked["extra_body"] = {"seed": 3}
    message = ai.responses.create(**asked).output[-1]
    (content,) = message.content
    assert content.logprobs
    assert b"".join(bytes(one.bytes) for one in content.logprobs).decode() == content.text
    assert all(len(one.top_logprobs) == 2 for one in content.logprobs)
    assert all(math.isfinite(one.logprob) for one in content.logprobs)
    with ai.responses.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
    streamed = [one for delta in deltas for one in delta.logprobs]
    assert [one.token for one in streamed] == [one.token for one in content.logprobs]


async def test_the_async_client_cancels_polls_and_pages(live: Live):
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as ai:
        made = await ai.responses.create(**SLOW)
        assert (await ai.responses.cancel(made.id)).status == "cancelled"
        assert (await ai.responses.retrieve(made.id)).status == "cancelled"
        events = await ai.responses.retrieve(made.id, stream=True)
        assert [event.type async for event in events][-1] == "response.incomplete"
        found = [item async for item in ai.responses.input_items.list(made.id)]
        assert [item.content[0].text for item in found] == ["Hi"]
        await ai.responses.delete(made.id)


def test_what_cannot_be_cancelled_is_a_bad_request(ai: openai.OpenAI):
    made = ai.responses.create(model="fast", input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        ai.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.cancel("resp_none")
