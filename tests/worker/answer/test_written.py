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
