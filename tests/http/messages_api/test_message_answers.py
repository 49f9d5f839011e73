"""Anthropic's answers, from the daemon's events: streams, and answers in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvd.http import errors
from kvd.http.messages_api.answers import Head, StreamedMessage, WholeMessage
from kvd.http.messages_api.reading import Wanted
from kvd.http.messages_api.thinking import text_of
from protocol import messages
from protocol.errors import InvalidRequest, WorkerDied
from protocol.messages import Event, Generate
from protocol.parts import PartStart
from protocol.types import Usage

HEAD = Head("msg_1", "m", "req_1")
CALL = Generate(id="http", model="m", messages=[], max_tokens=5)
ACCEPTED = messages.Accepted(id="http", prompt_tokens=10, seed=7)
Parts = list[tuple[str, str]]
"""Kind and text of each part."""


def events_of(parts: Parts, cuts: set[int] = frozenset()) -> list[Event]:
    """Return the tokens events of these parts, cut before the characters at these positions."""
    text, starts, size = "", {}, 0
    for number, (kind, content) in enumerate(parts):
        if number or kind != "text":
            name, call = ("look", f"call{number:05}") if kind == "call" else ("", "")
            starts.setdefault(len(text), []).append(PartStart(size, kind, name, call))
        text += content
        size += len(content.encode())
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    events: list[Event] = []
    for begin, end in zip(edges, edges[1:] or [0], strict=False):
        last = end == len(text)
        found = [start for at, some in starts.items() if begin <= at < end + last for start in some]
        events.append(
            messages.Tokens(
                id="http", index=len(events), tokens=[1], text=text[begin:end], parts=found
            )
        )
    return events


def done(reason: str = "stop", **usage: int) -> messages.Done:
    return messages.Done(id="http", reason=reason, usage=Usage(10, 5, **usage))


def streamed(*events: Event, omits: bool = False) -> list[dict]:
    answer = StreamedMessage(HEAD, Wanted(CALL, True, omits), 0.0)
    data = b"".join(answer.handle(0, event, 1.0) for event in events)
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert answer.over == isinstance(events[-1], messages.Done)
    return found


def whole(*events: Event, omits: bool = False) -> dict:
    answer = WholeMessage(HEAD, Wanted(CALL, False, omits), 0.0)
    for event in events:
        answer.handle(0, event, 1.0)
    return json.loads(answer.body())


def joined(found: list[dict]) -> dict[str, Any]:  # noqa: C901 - one match
    """Return the message that a stream describes; blocks follow one another."""
    message = found[0]["message"]
    assert message["content"] == []
    arguments, open_ = "", None
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert open_ is None
                assert event["index"] == len(message["content"])
                open_, arguments = event["content_block"], ""
                message["content"].append(open_)
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        open_["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        open_["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        open_["signature"] = text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
            case "content_block_stop":
                if arguments:
                    open_["input"] = read(arguments)
                open_ = None
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"], "kvd": event["kvd"]}
    assert found[-1] == {"type": "message_stop"}
    return message


def read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"INVALID_JSON": arguments}


TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["\n\n", "</think>", '<tool_call>{"name": "x"}</tool_call>', "é🦉", " a "]),
)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=3), st.text(max_size=6), max_size=3).map(json.dumps),
    st.sampled_from(['{"a": "</tool_call>"}', "", '{"cut": "of']),
)
PART = st.one_of(
    st.tuples(st.sampled_from(["text", "reasoning"]), TEXTS),
    st.tuples(st.just("call"), ARGUMENTS),
)


@given(st.lists(PART, max_size=5), st.sets(st.integers(1, 60)), st.booleans())
def test_streams_equal_answers_in_one_piece_for_any_cuts(parts: Parts, cuts, omits):
    events = [ACCEPTED, *events_of(parts, cuts), done()]
    answer = whole(*events, omits=omits)
    assert joined(streamed(*events, omits=omits)) == answer
    assert whole(ACCEPTED, *events_of(parts), done(), omits=omits) == answer
    assert [block["type"] for block in answer["content"]] == expected_types(parts)


def expected_types(parts: Parts) -> list[str]:
    names = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
    return [
        names[kind]
        for kind, text in parts
        if kind == "call" or (text.strip() if kind == "text" else text)
    ]


def test_a_thinking_block_a_text_and_two_calls():
    parts = [
        ("reasoning", "Hm."),
        ("text", "\n\n"),
        ("call", '{"at": 1}'),
        ("text", "\n"),
        ("call", ""),
        ("text", "\nDone"),
    ]
    answer = whole(ACCEPTED, *events_of(parts), done())
    thinking, first, second, text = answer["content"]
    assert thinking["thinking"] == "Hm."
    assert first == {"type": "tool_use", "id": "call00002", "name": "look", "input": {"at": 1}}
    assert (second["id"], second["input"]) == ("call00004", {})
    assert text == {"type": "text", "text": "\nDone"}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


def test_markers_in_texts_and_arguments_are_text():
    """The worker has split the answer; a literal marker ends nothing (omlx#2507, #3794)."""
    parts = [
        ("text", "Write </tool_call> to close <tool_call>."),
        ("call", '{"text": "</tool_call><think>"}'),
    ]
    text, call = whole(ACCEPTED, *events_of(parts), done())["content"]
    assert text["text"] == "Write </tool_call> to close <tool_call>."
    assert call["input"] == {"text": "</tool_call><think>"}


def test_a_call_that_was_cut_off():
    parts = [("call", '{"path": "a')]
    answer = whole(ACCEPTED, *events_of(parts), done("length"))
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {"INVALID_JSON": '{"path": "a'}
    cut = streamed(ACCEPTED, *events_of(parts), done("length"))
    assert [event["type"] for event in cut[-3:]] == [
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_reasons():
    hello = events_of([("text", "Hello")])
    assert whole(ACCEPTED, *hello, done())["stop_reason"] == "end_turn"
    assert whole(ACCEPTED, *hello, done("length"))["stop_reason"] == "max_tokens"
    early = messages.Done(id="http", reason="length", usage=Usage(10, 4))
    assert whole(ACCEPTED, *hello, early)["stop_reason"] == "model_context_window_exceeded"
    stopped = whole(ACCEPTED, *hello, replace(done(), stop_text="END"))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")


def test_an_answer_without_text_has_no_blocks():
    assert whole(ACCEPTED, *events_of([("text", " \n")]), done())["content"] == []


def test_the_first_event_has_the_true_input_tokens():
    """sglang#20678: clients show the used context from it."""
    assert streamed(ACCEPTED) == [], "the prefix cache is searched when the prefill begins"
    (first,) = streamed(ACCEPTED, messages.PrefillStarted(id="http", cached_tokens=8))
    usage = first["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 8)
    assert first["message"]["stop_reason"] is None


def test_a_stream_begins_with_the_first_tokens_or_the_end_if_no_prefill_is_reported():
    """As after the death of a worker."""
    for event in (*events_of([("text", "Hi")]), done()):
        first, second, *_ = streamed(ACCEPTED, event)
        assert (first["type"], first["message"]["usage"]["input_tokens"]) == ("message_start", 10)
        assert second["type"] != "message_start"


def test_usage_at_the_end_tells_cached_from_new_tokens():
    end = streamed(ACCEPTED, done(cached_tokens=8, reasoning_tokens=2))[-2]
    assert end["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_omitted_thinking_is_only_in_the_signature():
    parts = [("reasoning", "Secret"), ("text", "Hi")]
    events = streamed(ACCEPTED, *events_of(parts), done(), omits=True)
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == ["signature_delta", "text_delta"]
    block = whole(ACCEPTED, *events_of(parts), done(), omits=True)["content"][0]
    assert block["thinking"] == ""
    assert text_of("", block["signature"]) == "Secret"


def test_a_call_begins_with_its_id_and_its_name():
    """opencode#26412: a client that sees no name at the beginning drops the call."""
    start = streamed(ACCEPTED, *events_of([("call", "{}")]))[1]
    block = {"type": "tool_use", "id": "call00000", "name": "look", "input": {}}
    assert start == {"type": "content_block_start", "index": 0, "content_block": block}


def test_a_silent_stream_sends_pings_and_an_error_ends_it():
    answer = StreamedMessage(HEAD, Wanted(CALL, True, False), 0.0)
    assert answer.waiting() == b'event: ping\ndata: {"type":"ping"}\n\n'
    refusal = errors.of(WorkerDied("the process ended").info())
    name, line = answer.failed(refusal).decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(line.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == "req_1"


def test_an_answer_in_one_piece_is_bounded(monkeypatch):
    monkeypatch.setattr("kvd.http.messages_api.answers.MOST_BYTES", 10)
    with pytest.raises(InvalidRequest, match="10 bytes"):
        whole(ACCEPTED, *events_of([("text", "x" * 11)]), done())
