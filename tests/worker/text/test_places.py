"""The message that a token of a prompt belongs to, in templates of several styles."""

from __future__ import annotations

import contextlib
from functools import cache
from itertools import takewhile

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvd.worker.text import places
from kvd.worker.text.places import Conversation
from kvd.worker.text.text import Text
from protocol.cache_outcome import PromptPlace
from protocol.errors import InvalidRequest
from protocol.tools import ChatOptions, Tool, ToolCall
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.worker.text import templates
from tests.worker.text.tokenizers_zoo import byte_level, wrap

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOOLS = [
    Tool(name=name, description=f"does {name}", parameters={"type": "object"})
    for name in ("find", "read", "write")
]
SESSION = [
    ChatMessage("system", "You are an agent."),
    ChatMessage("user", "find the file"),
    ChatMessage("assistant", "", tool_calls=[ToolCall("find", '{"name": "a.py"}', "abcdefgh1")]),
    ChatMessage("tool", "src/a.py", tool_call_id="abcdefgh1", name="find"),
    ChatMessage("assistant", "It is in src."),
    ChatMessage("user", "thank you"),
]
STYLES = ["QWEN", "CODER", "LLAMA", "MISTRAL", "GPT_OSS", "TEXT_ARGUMENTS"]


@cache
def text_of(style: str) -> Text:
    added = (*MARKERS, "[TOOL_CALLS]", "[ARGS]", "<|call|>", "<|im_end|>")
    wrapper = wrap(byte_level(*added), template=getattr(templates, style))
    return Text(wrapper, vocab_size=2000, context_length=4096)


def place(
    text: Text,
    now: list[ChatMessage],
    before: list[ChatMessage],
    options: tuple[ChatOptions, ChatOptions] = (ChatOptions(), ChatOptions()),
) -> PromptPlace | None:
    """Return the place where two conversations differ, as `explain` finds it."""
    one, other = (
        text.encode(Submit(rid="r", messages=messages, chat=chat, sampling=Sampling(seed=0)))
        for messages, chat in zip((now, before), options, strict=True)
    )
    pairs = zip(one, other, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert same < min(len(one), len(other))
    return text.place_of(Conversation(now, options[0]), one, same, other[same : same + 16])


def edited(message: ChatMessage, at: int) -> ChatMessage:
    if message.tool_calls:
        call = replace(message.tool_calls[0], arguments='{"name": "b.py"}')
        return replace(message, tool_calls=[call])
    cut = at % len(message.content)
    return replace(message, content=message.content[:cut] + "~" + message.content[cut:])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("index", range(len(SESSION)))
def test_the_edited_message_is_named(style: str, index: int):
    text = text_of(style)
    other = [*SESSION[:index], edited(SESSION[index], 3), *SESSION[index + 1 :]]
    wanted = PromptPlace("message", index + 1, len(SESSION), SESSION[index].role)
    assert place(text, other, SESSION) == wanted
    assert place(text, SESSION, other) == wanted


@pytest.mark.parametrize("style", ["QWEN", "LLAMA", "GPT_OSS"])
@pytest.mark.parametrize("index", [1, 2, 3, 4])
def test_a_result_that_moved_next_to_its_call_is_named(style: str, index: int):
    calls = [ToolCall("find", '{"name": "a.py"}', one) for one in ("abcdefgh1", "abcdefgh2")]
    results = [ChatMessage("tool", f"in {one.id}", tool_call_id=one.id) for one in calls]
    session = [
        SESSION[1],
        ChatMessage("assistant", "", tool_calls=calls),
        *reversed(results),
        SESSION[5],
    ]
    other = list(session)
    other[index] = edited(session[index], 1)
    if index == 1:
        other[1] = replace(session[1], tool_calls=[calls[0], *other[1].tool_calls])
    found = place(text_of(style), other, session)
    assert found == PromptPlace("message", index + 1, len(session), session[index].role)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["QWEN", "STRICT_EFFORT", "GPT_OSS"]),
    st.lists(st.text("ab \n", min_size=1, max_size=9), min_size=2, max_size=7),
    st.data(),
)
def test_any_edit_is_found(style, contents, data):
    roles = ["user", "assistant"] * len(contents)
    messages = [ChatMessage(role, content) for role, content in zip(roles, contents, strict=False)]
    index = data.draw(st.integers(0, len(messages) - 1))
    assume(messages[index].content.strip())
    change = edited(messages[index], data.draw(st.integers(0, 20)))
    found = place(text_of(style), [*messages[:index], change, *messages[index + 1 :]], messages)
    assert found == PromptPlace("message", index + 1, len(messages), roles[index])


@pytest.mark.parametrize("style", ["QWEN", "LLAMA", "MISTRAL"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_edited_tool_is_named(style: str, number: int):
    other = list(TOOLS)
    other[number - 1] = replace(other[number - 1], name="other")
    options = ChatOptions(tools=TOOLS), ChatOptions(tools=other)
    found = place(text_of(style), SESSION, SESSION, options)
    assert found == PromptPlace("tools", number, 3)


def test_a_message_that_is_left_out_and_one_that_is_longer():
    text = text_of("QWEN")
    shorter = [SESSION[0], *SESSION[2:]]
    assert place(text, SESSION, shorter) == PromptPlace("message", 2, 6, "user")
    longer = [replace(SESSION[0], content=SESSION[0].content + " It is 12:03."), *SESSION[1:]]
    assert place(text, SESSION, longer) == PromptPlace("message", 1, 6, "system")


def test_the_templates_own_text():
    text = text_of("GPT_OSS")
    options = ChatOptions(effort="low"), ChatOptions(effort="high")
    found = place(text, SESSION[1:2], SESSION[1:2], options)
    assert found == PromptPlace("template")


def test_a_template_that_reacts_to_marks_and_long_conversations_are_not_explained(monkeypatch):
    changing = SESSION[:2], [SESSION[0], edited(SESSION[1], 3)]
    text = text_of("QWEN")
    monkeypatch.setattr(places, "MAX_MESSAGES", 1)
    assert place(text, *changing) is None
    monkeypatch.undo()
    monkeypatch.setattr(
        text.template, "render", lambda messages, _chat: str([len(m.content) for m in messages])
    )
    assert place(text, [ChatMessage("user", "abc")], [ChatMessage("user", "abcd")]) is None


def test_the_size_of_a_conversation_is_computed_once():
    """Each new request adds up the sizes of those that wait."""
    messages = [ChatMessage("user", "x" * 10)]
    conversation = Conversation(messages, ChatOptions())
    size = conversation.characters
    messages *= 1000
    assert conversation.characters == size


def nested(depth: int) -> ChatMessage:
    arguments = '{"name": ' + "[" * depth + '"a.py"' + "]" * depth + "}"
    return ChatMessage("assistant", "", tool_calls=[ToolCall("find", arguments, "abcdefgh1")])


@pytest.mark.parametrize("depth", [10, 200, 800, 100_000])
def test_arguments_of_any_depth_end_no_request(depth: int):
    """A place only explains a miss: an error while it is searched must not fail the step."""
    messages = [SESSION[1], nested(depth), *SESSION[3:]]
    text = Text(
        wrap(byte_level(*MARKERS, "<|im_end|>"), template=templates.TEXT_ARGUMENTS),
        vocab_size=2000,
        context_length=1 << 20,
    )
    other = [edited(messages[0], 3), *messages[1:]]
    assert place(text, messages, other) in (PromptPlace("message", 1, len(messages), "user"), None)
    with contextlib.suppress(InvalidRequest):
        text_of("QWEN").template.render(messages, ChatOptions())


class Panic(BaseException):
    """As libraries in Rust raise it."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [Panic("index"), RecursionError(), IndexError(), MemoryError()])
def test_a_tokenizer_that_fails_leaves_the_place_unknown(error: BaseException, monkeypatch):
    text = text_of("QWEN")
    other = [edited(SESSION[0], 3), *SESSION[1:]]
    assert place(text, other, SESSION) is not None

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(text, "_offset", fail)
    assert place(text, other, SESSION) is None
    monkeypatch.setattr(text, "_offset", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        place(text, other, SESSION)
