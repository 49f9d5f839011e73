"""Calls that are written as text are read as the same calls."""

from __future__ import annotations

import json

import pytest

from kvd.worker.answer import forms
from kvd.worker.answer.forms import AnswerForms, WholeBody
from kvd.worker.answer.written import write_calls
from protocol.tools import ToolCall
from tests.worker.answer.reading import calls, read_text

ARGUMENTS = [
    {"city": 'Köln "x"\n<b>', "days": 2},
    {"city": "Rome", "wind": True, "units": ["C", {"a": None}]},
    {},
]
READABLE = [
    form
    for form in forms.CALLS
    if not isinstance(form.body, WholeBody) or form.body.parser == "pythonic"
]


def written(*arguments):
    return [ToolCall("get_weather", json.dumps(one), "a") for one in arguments]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("form", READABLE, ids=lambda form: form.name)
def test_written_calls_are_read_as_the_same_calls(form, count):
    given = ARGUMENTS[:count]
    found = read_text(AnswerForms(call=form), write_calls(form, written(*given)), by_token=False)
    assert calls(found) == [("get_weather", one) for one in given]


def test_deepseeks_attribute_tells_strings_from_other_values():
    """The tool's schema says nothing of the key ``note``."""
    given = {"note": "12", "more": 12, "last": "null", "city": "true"}
    for form in (forms.DEEPSEEK_V32, forms.DEEPSEEK_V4):
        text = write_calls(form, written(given))
        assert calls(read_text(AnswerForms(call=form), text, by_token=False)) == [
            ("get_weather", given)
        ]


@pytest.mark.parametrize("rest", ["", "\n", "\n``", "\n```"])
def test_arguments_are_a_call_if_the_end_of_their_block_is_cut_off(rest):
    text = write_calls(forms.DEEPSEEK_R1, written(ARGUMENTS[0]))
    cut = text[: text.index("\n```<")] + rest
    found = read_text(AnswerForms(call=forms.DEEPSEEK_R1), cut, by_token=False)
    assert calls(found) == [("get_weather", ARGUMENTS[0])]


def test_whitespace_around_the_parts_of_a_named_call_is_free():
    text = write_calls(forms.DEEPSEEK_R1, written({"days": 2})).replace("```json\n", "```json  ")
    assert calls(read_text(AnswerForms(call=forms.DEEPSEEK_R1), text, by_token=False)) == [
        ("get_weather", {"days": 2})
    ]


def test_coheres_calls_are_numbered():
    text = write_calls(forms.COHERE, written({"days": 2}, {}))
    assert text.count('{"tool_call_id": "0", "tool_name"') == 1
    assert text.count('{"tool_call_id": "1", "tool_name"') == 1


def test_pythonic_calls_are_one_list():
    text = write_calls(forms.PYTHONIC, written({"days": 2}, {"wind": True}))
    assert text == (
        "<|tool_call_start|>[get_weather(days=2), get_weather(wind=True)]<|tool_call_end|>"
    )


def test_numbers_of_calls_count_up():
    text = write_calls(forms.KIMI, written({}, {}))
    assert "functions.get_weather:0<" in text
    assert "functions.get_weather:1<" in text


@pytest.mark.parametrize("form", [None, forms.GEMMA])
def test_calls_of_a_form_that_cannot_be_written_are_json(form):
    text = write_calls(form, written({"days": 2}))
    assert '{"name": "get_weather", "arguments": {"days": 2}}' in text


def test_arguments_that_were_cut_off_are_kept():
    assert '{\\"city\\": ' in write_calls(forms.QWEN, [ToolCall("get_weather", '{"city": ', "a")])
