"""Logprobs of a response: those of the message's tokens, without markers, reasoning and calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.responses_api import output_items
from protocol import messages
from protocol.messages import Event
from protocol.parts import PartStart
from protocol.types import Alternative, TokenLogprob, Usage
from tests.http.responses_api.asked import events, post, read
from tests.http.stage import hangs, serving

LOGPROBS = "message.output_text.logprobs"
EURO = "€".encode()
STREAM = [
    ("marker", b"<think>"),
    ("reasoning", b"so"),
    ("reasoning", b" the answer"),
    ("marker", b"</think>"),
    ("marker", b"\n\n"),
    ("text", b"the"),
    ("text", b" "),
    ("text", EURO[:1]),
    ("text", EURO[1:]),
    ("text", b" <"),
    ("text", b"so>."),
    ("marker", b"<tool_call>"),
    ("call", b"{}"),
    ("marker", b"</tool_call>"),
]
MESSAGE = [list(content) for kind, content in STREAM if kind == "text"]
DONE = messages.Done(
    id="http", reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=len(STREAM))
)


def token(content: bytes) -> TokenLogprob:
    text = content.decode("utf-8", "replace")
    hidden = list(content) if text.encode() != content else None
    top = [Alternative(1, text, -0.5, hidden), Alternative(9, "other", -1.0)]
    return TokenLogprob(1, text, -0.5, hidden, top)


def answered(sizes: list[int], lag: int) -> list[Event]:
    """Return the answer in events of so many tokens, whose text comes so many tokens later."""
    found: list[Event] = [messages.Accepted(id="http", prompt_tokens=1, seed=1)]
    sent, total, at, kind_now = b"", b"", 0, "text"
    starts: list[PartStart] = []
    for begin, end in zip([0, *sizes], [*sizes, len(STREAM)], strict=True):
        tokens = STREAM[begin:end]
        shown = STREAM if end == len(STREAM) else STREAM[: max(0, end - lag)]
        for kind, content in shown[at:]:
            if kind != "marker":
                if kind != kind_now:
                    starts.append(PartStart(len(total), kind))
                    kind_now = kind
                total += content
        at = max(at, len(shown))
        text = total[len(sent) :].decode("utf-8", "ignore")
        sent += text.encode()
        now = [start for start in starts if start.at <= len(sent)]
        starts = [start for start in starts if start not in now]
        found.append(
            messages.Tokens(
                id="http",
                index=begin,
                tokens=[1] * len(tokens),
                text=text,
                parts=now,
                logprobs=[token(content) for _, content in tokens],
            )
        )
    return [*found, DONE]


def stream(given: list[Event], **fields) -> list[dict]:
    from kvd.http.responses_api.answer import ResponseAnswer

    answer = ResponseAnswer(read(stream=True, **fields), 0.0, lambda: 0)
    return events(b"".join(answer.handle(0, event, 0.0) for event in given).decode())


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True).map(sorted), st.integers(0, 3))
def test_deltas_and_the_message_have_exactly_the_tokens_of_its_text(sizes: list[int], lag: int):
    found = stream(answered(sizes, lag), include=[LOGPROBS], top_logprobs=2)
    deltas = [one for one in found if one["type"] == "response.output_text.delta"]
    assert [one["bytes"] for delta in deltas for one in delta["logprobs"]] == MESSAGE
    (message,) = [one for one in found[-1]["response"]["output"] if one["type"] == "message"]
    (content,) = message["content"]
    assert content["text"].encode() == b"".join(map(bytes, MESSAGE))
    assert [one["bytes"] for one in content["logprobs"]] == MESSAGE
    assert content["logprobs"][0]["top_logprobs"][1] == {
        "token": "other",
        "logprob": -1.0,
        "bytes": list(b"other"),
    }


def test_logprobs_are_requested_by_either_field():
    assert read().call.logprobs is None
    assert read(include=[LOGPROBS]).call.logprobs == 0
    assert read(top_logprobs=3).call.logprobs == 3
    assert read(top_logprobs=3).response.top_logprobs == 3
    assert read(top_logprobs=0).call.logprobs is None


async def test_too_many_logprobs_in_one_piece_are_refused(home, monkeypatch):
    monkeypatch.setattr(output_items, "MOST_LOGPROBS", 300)
    given = answered([4], 0)
    async with serving(home, hangs(*given)) as stage:
        refused = await post(stage.url, include=[LOGPROBS])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
        streamed = events((await post(stage.url, include=[LOGPROBS], stream=True)).text)
    deltas = [one for one in streamed if one["type"] == "response.output_text.delta"]
    assert [one["bytes"] for delta in deltas for one in delta["logprobs"]] == MESSAGE
    assert streamed[-1]["response"]["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("value", [21, -1, "many"])
async def test_a_wrong_number_is_refused_with_its_field(home, value):
    async with serving(home) as stage:
        refused = await post(stage.url, top_logprobs=value)
        assert refused.status_code == 400
        assert json.loads(refused.text)["error"]["param"] == "top_logprobs"
