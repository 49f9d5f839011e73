"""Answers that continue the last message of a conversation."""

from __future__ import annotations

import pytest

from protocol.errors import InvalidRequest
from protocol.tools import ChatOptions, Grammar
from protocol.types import ChatMessage
from tests.worker.text import templates
from tests.worker.text.test_template import ASKED, CALL, HARMONY, MARKERS, rendered, submit, text_of

BEGUN = ChatMessage("assistant", "It is")
CONTINUE = ChatOptions(continue_final=True)


def prompt_of(text, *messages: ChatMessage, **chat) -> str:
    request = submit(messages=[*messages], chat=ChatOptions(continue_final=True, **chat))
    return text._tokenizer.decode(text.encode(request))


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "MISTRAL", "GEMMA"])
def test_the_prompt_is_that_of_the_answer_with_the_text_that_begins_it(name):
    text = text_of(getattr(templates, name), *MARKERS, "[TOOL_CALLS]", "[ARGS]")
    expected = rendered(text, [ASKED], reasoning=False) + "It is"
    assert prompt_of(text, ASKED, BEGUN, reasoning=False) == expected


def test_reasoning_that_the_prompt_begins_is_ended_and_the_answer_has_none():
    text = text_of(templates.CODER, *MARKERS)
    assert rendered(text, [ASKED]).endswith("<think>\n")
    assert prompt_of(text, ASKED, BEGUN).endswith("<think>\n</think>\n\nIt is")
    request = submit(messages=[ASKED, BEGUN], chat=CONTINUE, grammar=Grammar("json_object"))
    prompt = text.encode(request)
    assert not text.answer_context(request, prompt).may_reason
    stream = text.stream(request, prompt)
    answer = text._tokenizer.encode(" fine.", add_special_tokens=False)
    assert "".join(stream.push(token) for token in answer) + stream.finish() == " fine."
    assert stream.take_parts() == []


@pytest.mark.parametrize("last", [ASKED, CALL])
def test_only_a_text_of_the_assistant_is_continued(last):
    text = text_of(templates.QWEN, *MARKERS)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        text.encode(submit(messages=[ASKED, last], chat=CONTINUE))


def test_an_answer_of_several_messages_is_not_continued():
    text = text_of(templates.GPT_OSS, *HARMONY, "<|call|>")
    with pytest.raises(InvalidRequest, match="several messages"):
        text.encode(submit(messages=[ASKED, BEGUN], chat=CONTINUE))
