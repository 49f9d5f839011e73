"""Output items and events of a response, over the real server and a scripted daemon."""

from __future__ import annotations

import json

import pytest

from protocol import messages
from protocol.errors import ContextTooLong, NumericalError
from tests.http.responses_api.asked import AGENTS, PATCH, WEATHER, events, parts, post
from tests.http.stage import fails, says, serving

CALL = ("call", '{"city": "Paris"}', "weather", "abcdefgh1")
THOUGHT = ("reasoning", "Let me think.")


async def stream(home, script, **fields) -> list[dict]:
    async with serving(home, script) as stage:
        answer = await post(stage.url, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


async def test_a_stream_of_reasoning_text_and_a_call_has_the_events_in_order(home):
    script = parts(THOUGHT, ("text", "Hello."), CALL, cut=1000, reasoning_tokens=4)
    found = await stream(home, script, tools=[WEATHER])
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    items = [event for event in found if "item_id" in event]
    assert [event["output_index"] for event in items] == [0] * 4 + [1] * 4 + [2] * 2
    response = found[-1]["response"]
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert {event["item_id"] for event in items} == {item["id"] for item in response["output"]}
    assert response["output"][2] | {"id": ""} == {
        "type": "function_call",
        "id": "",
        "call_id": "abcdefgh1",
        "name": "weather",
        "arguments": '{"city": "Paris"}',
        "status": "completed",
    }
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 14,
    }
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
async def test_the_deltas_of_a_stream_are_the_answer_in_one_piece(home, cut):
    given = [
        THOUGHT,
        ("text", "Ärger — \n"),
        ("call", '{"input": "*** Begin\\n+ä\\"\\u00e9\\ud83d\\ude00"}', "apply_patch", "p"),
        ("call", "{}", "agents__close", "q"),
    ]
    fields = {"tools": [PATCH, AGENTS], "include": ["reasoning.encrypted_content"]}
    found = await stream(home, parts(*given, cut=cut), **fields)
    async with serving(home, parts(*given, cut=cut)) as stage:
        whole = (await post(stage.url, **fields)).json()
    own = found[-1]["response"]["id"].removeprefix("resp_")
    same = json.loads(json.dumps(found[-1]["response"]).replace(own, whole["id"][5:]))
    assert same["output"] == whole["output"]
    assert [item["id"] for item in same["output"]] == [item["id"] for item in whole["output"]]
    deltas = ["", "", "", ""]
    for event in found:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    assert deltas[0] == "Let me think."
    assert deltas[1] == "Ärger — \n"
    assert deltas[2] == whole["output"][2]["input"] == '*** Begin\n+ä"é😀'
    assert deltas[3] == "{}"
    assert whole["output"][2] | {"id": ""} == {
        "type": "custom_tool_call",
        "id": "",
        "call_id": "p",
        "name": "apply_patch",
        "input": '*** Begin\n+ä"é😀',
        "status": "completed",
    }
    assert (whole["output"][3]["name"], whole["output"][3]["namespace"]) == ("close", "agents")


async def test_reasoning_is_a_summary_for_clients_that_ask_for_one(home):
    found = await stream(home, parts(THOUGHT), reasoning={"summary": "auto"})
    kinds = [event["type"] for event in found]
    assert "response.reasoning_summary_part.added" in kinds
    assert "response.reasoning_text.delta" not in kinds
    text = "".join(
        event["delta"] for event in found if event["type"].endswith("summary_text.delta")
    )
    assert text == "Let me think."
    assert found[-1]["response"]["output"][0]["summary"] == [
        {"type": "summary_text", "text": "Let me think."}
    ]


async def test_white_space_between_parts_is_no_message(home):
    script = parts(THOUGHT, ("text", "\n\n"), CALL, ("text", "\n"), cut=1)
    found = await stream(home, script, tools=[WEATHER])
    kinds = [item["type"] for item in found[-1]["response"]["output"]]
    assert kinds == ["reasoning", "function_call"]


async def test_an_empty_answer_is_an_empty_message(home):
    async with serving(home, parts(("text", ""))) as stage:
        whole = (await post(stage.url)).json()
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]


async def test_a_truncated_call_is_incomplete(home):
    given = ("call", '{"city": "Par', "weather", "abcdefgh1")
    found = await stream(home, parts(given, reason="length"), tools=[WEATHER])
    assert found[-1]["type"] == "response.incomplete"
    response = found[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == response["status"] == "incomplete"
    assert response["output"][0]["arguments"] == '{"city": "Par'


async def test_an_error_before_the_stream_has_its_status(home):
    async with serving(home, fails(NumericalError("bad logits"))) as stage:
        answer = await post(stage.url, stream=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "numerical_error"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextTooLong("too long"), "context_length_exceeded"),
        (NumericalError("bad logits"), "server_error"),
    ],
)
async def test_an_error_in_a_stream_is_a_failed_response_with_openais_code(home, error, code):
    begun = messages.Accepted(id="http", prompt_tokens=1, seed=1)
    queued = messages.Queued(id="http", position=1)
    word = messages.Tokens(id="http", index=0, tokens=[1], text="Hel")
    found = await stream(home, fails(error, queued, begun, word))
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert response["error"]["message"] == error.message


async def test_a_stream_without_data_gets_typed_events(home, monkeypatch):
    """Comments do not reset the idle timers of agents."""
    monkeypatch.setattr("kvd.http.completion.KEEPALIVE_S", 0.01)
    import httpx

    from tests.http.stage import hangs

    async with serving(home, hangs(messages.Queued(id="http", position=2))) as stage:
        body = {"model": "m", "input": "Hi", "stream": True}
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{stage.url}/v1/responses", json=body) as answer,
        ):
            kinds, text = [], ""
            async for chunk in answer.aiter_text():
                text += chunk
                kinds = [line for line in text.split("\n") if line.startswith(("event", ":"))]
                if len(kinds) > 4:
                    break
    assert kinds[0] == "event: response.created"
    assert set(kinds[1:]) == {"event: response.in_progress"}


@pytest.mark.parametrize("field", ["instructions", "tools"])
async def test_a_stream_may_repeat_more_than_the_limit_of_unread_bytes(home, field):
    """It repeats them three times, and the client has had no time to read them."""
    large = "x" * 600_000
    value = large if field == "instructions" else [WEATHER | {"description": large}]
    async with serving(home, parts(("text", "Hello " * 50)), unread_limit=1_000_000) as stage:
        found = events((await post(stage.url, stream=True, **{field: value})).text)
    assert found[-1]["response"][field] == value


async def test_the_end_of_a_stream_may_repeat_a_long_text(home):
    """It repeats the text four times."""
    async with serving(home, says("x" * 900_000), unread_limit=1_000_000) as stage:
        found = events((await post(stage.url, stream=True)).text)
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "x" * 900_000
