"""Chat answers with reasoning and calls, in one piece and in chunks, without a server."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.parts import PartStart
from protocol.types import TokenLogprob
from tests.http.test_answers import CHAT, accepted, asked, chunks, done, finished, whole

Delta = dict[str, Any]

REASONING = "Löok it up."
ARGUMENTS = ['{"city": "Köln", "say": "</tool_call>"}', "{}", '{"n": [1, 2]}']
TEXT = REASONING + "One moment. " + "".join(ARGUMENTS)


def parts() -> list[PartStart]:
    at = len(REASONING.encode())
    found = [PartStart(0, "reasoning"), PartStart(at, "text")]
    at += len("One moment. ")
    for number, arguments in enumerate(ARGUMENTS):
        found.append(PartStart(at, "call", f"tool{number}", f"id{number}"))
        at += len(arguments.encode())
    return found


def cut(cuts: set[int], *, logprobs: bool = False) -> list[m.Tokens]:
    """Return the answer as events that begin at these characters."""
    events, left = [], parts()
    for start, end in pairwise([0, *sorted(cuts), len(TEXT)]):
        last = len(TEXT[:end].encode())
        here = [part for part in left if part.at < last]
        left = left[len(here) :]
        reported = [TokenLogprob(start, TEXT[start:end], -1.0)] if logprobs else None
        events.append(
            m.Tokens(
                id="http",
                index=start,
                tokens=[start],
                text=TEXT[start:end],
                parts=here,
                logprobs=reported,
            )
        )
    return events


def added(deltas: list[Delta]) -> Delta:
    """Return what a client has after these deltas."""
    found: Delta = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": {}}
    for delta in deltas:
        for key in ("content", "reasoning", "reasoning_content"):
            found[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            known = found["tool_calls"].setdefault(call["index"], {"arguments": ""})
            known |= {key: call[key] for key in ("id", "type") if key in call}
            function = call["function"]
            assert function.get("name", "") is not None
            known |= {"name": function["name"]} if "name" in function else {}
            known["arguments"] += function["arguments"]
    return found


CALLS = {
    number: {
        "arguments": arguments,
        "id": f"id{number}",
        "type": "function",
        "name": f"tool{number}",
    }
    for number, arguments in enumerate(ARGUMENTS)
}


def deltas_of(*events: m.Event, **more: Any) -> list[Delta]:
    got = chunks(CHAT, asked(**more), accepted(), *events, done())
    return [choice["delta"] for chunk in got for choice in chunk["choices"]]


@given(st.sets(st.integers(1, len(TEXT) - 1)), st.booleans())
def test_streamed_output_equals_whole_output_for_any_chunking(
    cuts: set[int], logprobs: bool
) -> None:
    events = cut(cuts, logprobs=logprobs)
    top = 0 if logprobs else None
    found = added(deltas_of(*events, logprobs=top))
    assert found["content"] == "One moment. "
    assert found["reasoning"] == found["reasoning_content"] == REASONING
    assert found["tool_calls"] == CALLS
    answer = whole(CHAT, asked(logprobs=top), accepted(), *events, done())["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"] == {
        "content": "One moment. ",
        "role": "assistant",
        "refusal": None,
        "reasoning_content": REASONING,
        "reasoning": REASONING,
        "tool_calls": [
            {
                "id": call["id"],
                "function": {"arguments": call["arguments"], "name": call["name"]},
                "type": "function",
            }
            for call in CALLS.values()
        ],
    }
    if logprobs:  # logprobs of all tokens, also of reasoning and calls
        assert "".join(one["token"] for one in answer["logprobs"]["content"]) == TEXT


def test_the_first_delta_of_a_call_has_id_type_and_name_and_later_ones_have_no_name() -> None:
    # opencode#26412: a later ``name: null`` replaced the name.
    deltas = deltas_of(*cut(set(range(1, len(TEXT)))))
    begun: set[int] = set()
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if call["index"] not in begun:
                begun.add(call["index"])
                assert call.keys() == {"index", "id", "type", "function"}
                assert (call["type"], function["arguments"]) == ("function", "")
                assert function["name"] == f"tool{call['index']}"
            else:
                assert call.keys() == {"index", "function"}
                assert function.keys() == {"arguments"}
                assert function["arguments"]
    assert begun == {0, 1, 2}


def test_every_delta_before_the_end_has_the_key_content() -> None:
    # cline#12132: a client without a default for a missing key fails.
    *deltas, last = deltas_of(*cut(set(range(1, len(TEXT)))))
    assert all("content" in delta for delta in deltas)
    assert last == {}


def test_reasoning_has_both_names_in_every_delta() -> None:
    deltas = [delta for delta in deltas_of(*cut({3, 7})) if "reasoning" in delta]
    assert len(deltas) >= 2
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)


def test_content_is_null_if_there_are_only_calls() -> None:
    event = m.Tokens(
        id="http", index=0, tokens=[1], text="{}", parts=[PartStart(0, "call", "f", "i")]
    )
    assert (
        whole(CHAT, asked(), accepted(), event, done())["choices"][0]["message"]["content"] is None
    )
    first, *_ = deltas_of(event)
    assert first == {"role": "assistant", "content": None}


def test_content_is_a_text_if_there_is_only_reasoning() -> None:
    event = m.Tokens(id="http", index=0, tokens=[1], text="Hm", parts=[PartStart(0, "reasoning")])
    answer = whole(CHAT, asked(), accepted(), event, done("length"))["choices"][0]
    assert answer["message"]["content"] == ""
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled"])
def test_only_an_answer_that_stops_by_itself_ends_with_tool_calls(reason: m.FinishReason) -> None:
    event = m.Tokens(
        id="http", index=0, tokens=[1], text='{"a', parts=[PartStart(0, "call", "f", "i")]
    )
    expected = {"length": "length", "stop": "tool_calls", "cancelled": "stop"}[reason]
    answer = whole(CHAT, asked(), accepted(), event, done(reason))
    assert answer["choices"][0]["finish_reason"] == expected
    got = chunks(CHAT, asked(), accepted(), event, done(reason))
    assert got[-1]["choices"][0]["finish_reason"] == expected


def test_each_choice_has_its_own_calls() -> None:
    call = PartStart(0, "call", "f", "i")
    first = m.Tokens(id="http", index=0, tokens=[1], text="{}", parts=[call])
    second = m.Tokens(id="http", index=0, tokens=[1], text="Hi", choice=1)
    events = [accepted(), first, second, finished(1, "stop"), finished(0, "stop"), done()]
    got = chunks(CHAT, asked(n=2), *events)
    ends = {it["index"]: it["finish_reason"] for chunk in got for it in chunk["choices"]}
    assert ends == {0: "tool_calls", 1: "stop"}
    reasons = [it["finish_reason"] for it in whole(CHAT, asked(n=2), *events)["choices"]]
    assert reasons == ["tool_calls", "stop"]


def test_reasoning_can_be_left_out() -> None:
    events = cut({3, 20}, logprobs=True)
    found = added(deltas_of(*events, hides_reasoning=True, logprobs=0))
    assert found["reasoning"] == found["reasoning_content"] == ""
    assert found["tool_calls"] == CALLS
    answer = whole(CHAT, asked(hides_reasoning=True), accepted(), *events, done())
    assert "reasoning" not in answer["choices"][0]["message"]


def test_usage_counts_reasoning() -> None:
    answer = whole(CHAT, asked(), accepted(), *cut(set()), done(reasoning_tokens=3))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_many_empty_calls_do_not_exceed_the_limit_of_an_answer_in_one_piece() -> None:
    calls = [PartStart(0, "call", "f", "i")] * 100_000
    event = m.Tokens(id="http", index=0, tokens=[1], text="", parts=calls)
    with pytest.raises(Exception, match="the answer in one piece would exceed"):
        whole(CHAT, asked(), accepted(), event, done())


def test_a_logprob_of_a_marker_is_reported() -> None:
    events = [
        m.Tokens(
            id="http",
            index=0,
            tokens=[1],
            text="",
            parts=[PartStart(0, "reasoning")],
            logprobs=[TokenLogprob(1, "<think>", -0.5)],
        )
    ]
    got = chunks(CHAT, asked(logprobs=0), accepted(), *events, done())
    reported = [it["logprobs"]["content"][0]["token"] for it in got[1]["choices"]]
    assert reported == ["<think>"]
