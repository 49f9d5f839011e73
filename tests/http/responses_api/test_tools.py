"""Tools of all kinds, and which of them may be called."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.responses_api.freeform import InputReader
from protocol.errors import InvalidRequest
from protocol.tools import Grammar
from tests.http.responses_api.asked import AGENTS, PATCH, WEATHER, read

ALL = [WEATHER, PATCH, AGENTS]


def test_an_allowed_tool_without_a_kind_is_not_allowed():
    choice = {"type": "allowed_tools", "tools": [{"type": []}, {"type": {}}]}
    assert read(tools=ALL, tool_choice=choice).call.chat.tools == []


def test_tools_of_all_kinds_reach_the_model_and_unknown_ones_are_counted():
    search = {"type": "web_search", "external_web_access": False}
    wanted = read(tools=[*ALL, search])
    weather, patch, close = wanted.call.chat.tools
    assert (weather.name, weather.parameters) == ("weather", WEATHER["parameters"])
    assert patch.grammar == Grammar("lark", 'start: "a"+')
    assert 'start: "a"+' in patch.description
    assert list(patch.parameters["properties"]) == ["input"]
    assert close.name == "agents__close"
    assert wanted.ignored["tool"] == 1


def test_a_custom_tool_without_a_grammar_takes_any_text():
    wanted = read(tools=[{"type": "custom", "name": "note", "format": {"type": "text"}}])
    assert wanted.call.chat.tools[0].grammar is None
    assert wanted.tools.known("note").custom


def test_tools_that_items_add_are_tools():
    added = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    wanted = read(input=[added, {"role": "user", "content": "Hi"}])
    assert [tool.name for tool in wanted.call.chat.tools] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "expected", "tools"),
    [
        ("required", "required", 3),
        ("none", "none", 3),
        ({"type": "function", "name": "weather"}, "name:weather", 3),
        ({"type": "custom", "name": "apply_patch"}, "name:apply_patch", 3),
        ({"type": "function", "name": "close", "namespace": "agents"}, "name:agents__close", 3),
        ({"type": "web_search"}, "auto", 3),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
            },
            "auto",
            1,
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "apply_patch"}],
            },
            "name:apply_patch",
            3,
        ),
    ],
)
def test_tool_choices(choice, expected, tools):
    chat = read(tools=ALL, tool_choice=choice).call.chat
    assert (chat.tool_choice, len(chat.tools)) == (expected, tools)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "name:weather", "tools": ALL}, "tool_choice"),
        ({"tool_choice": {"type": []}, "tools": ALL}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": ALL}, "'no'"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "no"}],
                },
                "tools": ALL,
            },
            "'no'",
        ),
        ({"tools": [WEATHER | {"name": "two words"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [AGENTS | {"tools": [{"type": "function", "name": 1}]}]}, "tools[0].tools[0]"),
        ({"tools": [PATCH | {"format": {"type": "grammar"}}]}, "grammar"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(fields, text):
    with pytest.raises(InvalidRequest) as refused:
        read(**fields)
    assert text in refused.value.message


@given(text=st.text(), cuts=st.lists(st.integers(0, 200)), ascii_only=st.booleans())
def test_the_input_of_a_custom_tool_is_the_same_for_any_cut(text, cuts, ascii_only):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    expected = text.encode("utf-8", "replace").decode()
    reader = InputReader()
    found, at = "", 0
    for cut in [*sorted({min(cut, len(arguments)) for cut in cuts}), len(arguments)]:
        found += reader.push(arguments[at:cut])
        at = cut
    found += reader.finish()
    assert found == reader.input == expected


def test_the_input_is_the_same_for_a_cut_within_any_escape():
    text = 'a"\\\n\t\u00e9😀\x01/ud83d end'
    arguments = json.dumps({"input": text})
    for cut in range(len(arguments)):
        reader = InputReader()
        found = reader.push(arguments[:cut]) + reader.push(arguments[cut:]) + reader.finish()
        assert found == text, arguments[:cut]


@given(st.text(alphabet='{}"\\:,inputud83e 1\n', max_size=30), st.text(max_size=3))
def test_any_arguments_are_read_without_an_error(arguments, rest):
    reader = InputReader()
    found = "".join(reader.push(character) for character in arguments + rest)
    found += reader.finish()
    assert found == reader.input
    found.encode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "abc', "abc"),
        ('{"input": "abc\\u00', "abc"),
        ('{"note": 1, "input": "x"}', "x"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("plain text", "plain text"),
    ],
)
def test_arguments_of_another_form_are_not_lost(arguments, expected):
    reader = InputReader()
    assert reader.push(arguments) + reader.finish() == expected
