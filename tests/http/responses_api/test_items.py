"""Input items become messages."""

from __future__ import annotations

import pytest

from kvd.http.responses_api.sealed import seal, unseal
from protocol.errors import EmptyPrompt, InvalidRequest
from protocol.tools import ToolCall
from protocol.types import ChatMessage
from tests.cpu_time import takes_less_than
from tests.http.responses_api.asked import read


def messages_of(**fields) -> list[ChatMessage]:
    return read(**fields).call.messages or []


def test_a_text_is_a_message_of_the_user_after_the_instructions():
    assert messages_of(input="Hi", instructions="Be brief.") == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi"),
    ]


def test_system_messages_at_the_beginning_are_one_and_later_ones_stay_in_place():
    """Many templates take only one; moving a later one would destroy the cached prefix."""
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "More."}]},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "Now be quick."},
    ]
    assert messages_of(input=items, instructions="First.") == [
        ChatMessage("system", "First.\n\nRules.\n\nMore."),
        ChatMessage("user", "Hi"),
        ChatMessage("system", "Now be quick."),
    ]


def test_the_items_of_one_answer_are_one_message():
    items = [
        {"role": "user", "content": "Weather?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "encrypted_content": seal("I look it up."),
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {
            "type": "function_call",
            "call_id": "b",
            "name": "close",
            "namespace": "agents",
            "arguments": '{"id": 1}',
        },
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a"b\n'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [
                {"type": "input_text", "text": "closed"},
                {"type": "input_image", "image_url": "data:..."},
            ],
        },
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
    ]
    calls = [
        ToolCall("weather", "{}", "a"),
        ToolCall("agents__close", '{"id": 1}', "b"),
        ToolCall("patch", '{"input":"a\\"b\\n"}', "c"),
    ]
    assert messages_of(input=items) == [
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "One moment.", "I look it up.", calls),
        ChatMessage("tool", "sunny", tool_call_id="a", name="weather"),
        ChatMessage(
            "tool",
            "closed\n[input_image omitted: the model reads only text]",
            tool_call_id="b",
            name="agents__close",
        ),
        ChatMessage("tool", "Done", tool_call_id="c", name="patch"),
    ]


@pytest.mark.parametrize("text", ["", "Hm.", "Ärger\n😀"])
def test_sealed_reasoning_is_unsealed(text):
    sealed = seal(text)
    assert unseal(sealed) == text
    assert unseal(sealed[:-2] + "AA") in {None, text}
    assert unseal(sealed.replace("kvd1.", "gAAAA")) is None
    assert unseal("kvd1.%%") is None


def test_reasoning_that_another_server_has_sealed_is_dropped_and_counted():
    foreign = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "A summary"}],
        "encrypted_content": "gAAAAABo",
    }
    answer = {"role": "assistant", "content": "Yes"}
    wanted = read(input=[{"role": "user", "content": "Hi"}, foreign, answer])
    assert wanted.call.messages[-1] == ChatMessage("assistant", "Yes")
    assert wanted.ignored["reasoning"] == 1


@pytest.mark.parametrize("key", ["content", "summary"])
def test_reasoning_in_clear_is_taken(key):
    item = {"type": "reasoning", "summary": []} | {key: [{"type": "x", "text": "Hm."}]}
    answer = {"role": "assistant", "content": "Yes"}
    assert messages_of(input=[item, answer]) == [ChatMessage("assistant", "Yes", "Hm.")]


def test_reasoning_without_an_answer_is_no_message():
    """An answer may have ended within its reasoning; no template can show that."""
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    again = {"role": "user", "content": "Go on"}
    assert messages_of(input=[item, again]) == [ChatMessage("user", "Go on")]


def test_items_that_kvd_does_not_have_are_ignored_and_counted():
    wanted = read(
        input=[
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"q": 1}},
            {"type": "computer_call_output", "call_id": "x", "output": {"type": "screenshot"}},
            {"role": "user", "content": "Hi"},
        ],
        client_metadata={"id": "1"},
        truncation="auto",
    )
    assert wanted.call.messages == [ChatMessage("user", "Hi")]
    assert wanted.ignored == {"item": 2, "reasoning": 0, "tool": 0}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_x_0"}]}, "input[0]"),
        ({"input": [{"id": "msg_x_0"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"temperature": 99}, "temperature"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_correctly_is_refused_with_its_place(fields, field):
    with pytest.raises(InvalidRequest) as refused:
        read(**fields)
    assert refused.value.detail["field"] == field
    assert field in refused.value.message or isinstance(refused.value, EmptyPrompt)


def test_neutral_values_of_refused_fields_are_accepted():
    assert messages_of(background=False, conversation=None, prompt=None)


def test_settings_reach_the_daemon():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    call = read(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        seed=-1,
        priority=3,
        keep_alive="1h",
    ).call
    assert (call.max_tokens, call.priority, call.chat.effort) == (9, 3, "high")
    assert (call.keep_alive_s, read(keep_alive=-1).call.keep_alive_s) == (3600, -1)
    with pytest.raises(InvalidRequest, match="keep_alive"):
        read(keep_alive="soon")
    assert (call.sampling.temperature, call.sampling.top_p) == (0.5, 0.9)
    assert call.sampling.seed == 2**63 - 1
    assert call.grammar.kind == "json_schema"
    assert '"integer"' in call.grammar.value
    assert read(text={"format": {"type": "json_object"}}).call.grammar.kind == "json_object"
    assert read(reasoning={"effort": "none"}).call.chat.reasoning is False


def test_any_number_of_system_messages_is_joined_in_linear_time():
    def join() -> None:
        items = [{"role": "system", "content": "a" * 98}] * 30_000
        (message,) = read(input=items).call.messages or []
        assert len(message.content) == 30_000 * 100 - 2

    assert takes_less_than(1, join)  # joined one by one: over 2.5 s, in the event loop
