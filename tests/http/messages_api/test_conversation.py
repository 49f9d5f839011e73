"""Anthropic's content blocks as messages for the chat template."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvd.http.messages_api import reading
from kvd.http.messages_api.requests import MessagesRequest
from kvd.http.messages_api.thinking import sign
from kvd.http.reading import decode
from protocol.errors import InvalidRequest
from protocol.messages import Generate
from protocol.tools import Grammar, ToolCall
from protocol.types import ChatMessage
from tests.cpu_time import takes_less_than

TOOL = {"name": "look", "input_schema": {"type": "object"}}


def asked(*messages: dict, **fields: Any) -> Generate:
    given = {"model": "m", "max_tokens": 5, "messages": list(messages) or [user("Hi")]} | fields
    return reading.wanted(decode(msgspec.json.encode(given), MessagesRequest)).call


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


def assistant(*blocks: dict) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **more: Any) -> dict:
    return {"type": "text", "text": value} | more


def use(id_: str, **given: Any) -> dict:
    return {"type": "tool_use", "id": id_, "name": "look", "input": given}


def result(id_: str, content: Any = "", **more: Any) -> dict:
    return {"type": "tool_result", "tool_use_id": id_, "content": content} | more


def test_system_as_text_or_as_blocks():
    assert asked(system="Be brief.").messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi"),
    ]
    cached = text("One", cache_control={"type": "ephemeral"})
    assert asked(system=[cached, text("Two")]).messages[0].content == "One\nTwo"


def test_system_inside_messages_stays_in_its_place():
    """Moved to the front, it would change the prompt's beginning (omlx#2483, sglang#28883)."""
    given = [user("A"), assistant(text("B")), {"role": "system", "content": "Note"}, user("C")]
    before = asked(*given[:2], user("C"), system="S").messages
    after = asked(*given, system="S").messages
    assert [one.role for one in after] == ["system", "user", "assistant", "system", "user"]
    assert after[:3] == before[:3]
    assert asked(user("A"), {"role": "system", "content": [text("Last")]}).messages[-1] == (
        ChatMessage("system", "Last")
    )


def test_a_counter_in_the_system_prompt_changes_nothing_before_it():
    """omlx#2881: what comes before the counter is the same text, so its prefix is found."""
    one, other = (
        asked(system=[text("Long instructions"), text(f"count={n}")]).messages[0].content
        for n in (1, 2)
    )
    assert one != other
    assert one.startswith("Long instructions\ncount=")
    assert other.startswith("Long instructions\ncount=")


def test_tool_results_and_texts_keep_their_order():
    given = [
        user("Look twice"),
        assistant(
            {"type": "thinking", "thinking": "Hm", "signature": "x"},
            text("Looking"),
            use("a", at="x"),
            use("b"),
        ),
        user([result("a", "first"), result("b", [text("se"), text("cond")]), text("Well?")]),
    ]
    assert asked(*given, tools=[TOOL]).messages[1:] == [
        ChatMessage(
            "assistant",
            "Looking",
            reasoning="Hm",
            tool_calls=[ToolCall("look", '{"at":"x"}', "a"), ToolCall("look", "{}", "b")],
        ),
        ChatMessage("tool", "first", tool_call_id="a", name="look"),
        ChatMessage("tool", "se\ncond", tool_call_id="b", name="look"),
        ChatMessage("user", "Well?"),
    ]


def test_a_failed_tool_and_an_unknown_call():
    failed, unknown = asked(
        user([result("a", "no such file", is_error=True), result("zzz", None)])
    ).messages
    assert (failed.content, failed.name) == ("Error: no such file", "")
    assert (unknown.content, unknown.tool_call_id) == ("", "zzz")


def test_neighbours_of_one_role_become_one_message():
    given = [user("A"), user([text("B")]), assistant(text("C")), assistant(use("a")), user("D")]
    first, answer, last = asked(*given).messages
    assert (first.content, last.content) == ("A\nB", "D")
    assert (answer.content, answer.tool_calls[0].id) == ("C", "a")


@pytest.mark.parametrize("signature", [{}, {"signature": ""}, {"signature": "another server's"}])
def test_thinking_with_any_signature_is_accepted(signature):
    """Clients drop signatures, or send an empty one (qwen-code#11772)."""
    thinking = {"type": "thinking", "thinking": "Hm"} | signature
    _, answer, _ = asked(user("A"), assistant(thinking, text("B")), user("C")).messages
    assert (answer.reasoning, answer.content) == ("Hm", "B")


def test_thinking_that_was_omitted_comes_back_from_its_signature():
    omitted = {"type": "thinking", "thinking": "", "signature": sign("Hm…", omitted=True)}
    damaged = omitted | {"signature": omitted["signature"][:-3] + "!"}
    of = [asked(user("A"), assistant(one), user("C")).messages[1] for one in (omitted, damaged)]
    assert [one.reasoning for one in of] == ["Hm…", ""]


def test_redacted_thinking_is_dropped():
    redacted = {"type": "redacted_thinking", "data": "abc"}
    _, answer, _ = asked(user("A"), assistant(redacted, text("B")), user("C")).messages
    assert (answer.reasoning, answer.content) == ("", "B")


@pytest.mark.parametrize(
    ("fields", "named", "explained"),
    [
        ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].type",
         "read only text"),
        ({"messages": [user([result("a", [{"type": "image"}])])]},
         "messages[0].content[0].content[0].type", "read only text"),
        ({"messages": [user([{"type": "of_the_future"}])]}, "messages[0].content[0].type", "text"),
        ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text", "missing"),
        ({"messages": [user("A"), assistant({"type": "tool_use", "id": "a"}), user("B")]},
         "messages[1].content[0].name", "missing"),
        ({"messages": [user("A"), assistant(use("a") | {"input": [1]}), user("B")]},
         "messages[1].content[0].input", "object"),
        ({"messages": [user("A"), assistant(text("B "))]}, "messages", "white space"),
        ({"messages": [user("A"), assistant(text(""))]}, "messages", "no text"),
        ({"messages": [user("A"), assistant(use("a"))]}, "messages", "tool_use"),
        ({"messages": [user("A"), assistant(text("B"))], "thinking": {"type": "enabled"}},
         "messages", "turn thinking off"),
        ({"messages": [user("A"), assistant(text("B"))], "tools": [TOOL],
          "tool_choice": {"type": "any"}}, "messages", "forces a call"),
        ({"messages": [user("A"), assistant(text("{"))],
          "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "messages",
         "whole text"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "one of"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type",
         "Anthropic's servers"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "repeats"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice",
         "does not have"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens",
         "at least 1"),
        ({"stop_sequences": [""]}, "stop_sequences", "empty"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(fields, named, explained):
    with pytest.raises(InvalidRequest, match=explained) as refused:
        asked(**fields)
    assert refused.value.detail["field"].startswith(named)


def test_tools_and_choices():
    chat = asked(tools=[TOOL | {"description": "Looks", "strict": True, "type": "custom"}]).chat
    assert chat.tools[0].description == "Looks"
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("auto", True)
    for given, expected in {
        "auto": "auto",
        "any": "required",
        "none": "none",
    }.items():
        choice = {"type": given, "disable_parallel_tool_use": True}
        chat = asked(tools=[TOOL], tool_choice=choice).chat
        assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, False)
    named = asked(tools=[TOOL], tool_choice={"type": "tool", "name": "look"}).chat
    assert named.tool_choice == "name:look"


def test_thinking_and_effort():
    assert asked().chat.reasoning is False
    assert asked(thinking={"type": "disabled"}).chat.reasoning is False
    enabled = asked(thinking={"type": "enabled", "budget_tokens": 2048}).chat
    assert (enabled.reasoning, enabled.max_reasoning_tokens) == (True, 2048)
    adaptive = asked(thinking={"type": "adaptive"}, output_config={"effort": "xhigh"}).chat
    assert (adaptive.reasoning, adaptive.effort) == (True, "xhigh")


@pytest.mark.parametrize("newer", [True, False])
def test_structured_output(newer):
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {"output_config": {"format": wanted}} if newer else {"output_format": wanted}
    assert asked(**fields).grammar == Grammar("json_schema", '{"type":"object"}')


def test_sampling_and_extensions():
    call = asked(
        temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END"], seed=7, priority=3,
        deadline_s=9, cache_salt="s", keep_alive="5m", metadata={"user_id": "u"},
    )  # fmt: skip
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.5,
        0.9,
        40,
        7,
    )
    assert (call.stop, call.priority, call.deadline_s, call.prefix_salt) == (["END"], 3, 9, "s")
    assert (call.keep_alive_s, asked(keep_alive=0).keep_alive_s, asked().keep_alive_s) == (
        300,
        0,
        None,
    )
    with pytest.raises(InvalidRequest, match="keep_alive"):
        asked(keep_alive="soon")
    assert asked().sampling.temperature == 1.0
    assert asked(top_p=0).sampling.temperature == 0.0


def test_the_text_to_count_is_the_prompt_of_the_request():
    fields = {"tools": [TOOL], "system": "S"}
    messages = [user("Hi"), assistant(text("I"))]
    given = {"model": "m", "messages": messages} | fields
    counted = reading.text_to_count(decode(msgspec.json.encode(given), MessagesRequest))
    assert counted.chat == asked(*messages, **fields).chat
    assert [one.role for one in counted.messages] == ["system", "user", "assistant"]
    assert counted.limit == 0


def test_the_last_message_of_the_assistant_is_continued():
    call = asked(user("Name it."), assistant(text("The name")), assistant(text("is")))
    assert call.chat.continue_final
    assert call.messages[-1] == ChatMessage("assistant", "The name\nis")
    assert not asked(user("Name it.")).chat.continue_final


def test_any_number_of_neighbours_is_joined_in_linear_time():
    def join() -> None:
        (message,) = asked(*[user("a" * 99)] * 30_000).messages or []
        assert len(message.content) == 30_000 * 100 - 1

    assert takes_less_than(1, join)  # joined one by one: over 2.5 s, in the event loop
