"""Failures of other servers, by name: markers that are content, and content that is a marker."""

from __future__ import annotations

import json

import pytest

from kvd.worker.answer import forms
from kvd.worker.answer.forms import AnswerForms, Marker
from kvd.worker.answer.marked import CallOptions, MarkedAnswer
from kvd.worker.text.detokenizer import BytesTable
from kvd.worker.text.stream import AnswerSplit, TextStream
from protocol.parts import PartStart
from protocol.tools import Grammar, Tool
from tests.cpu_time import grows_linearly
from tests.worker.answer.reading import TOOLS, calls, joined, read_text, reader_of

QWEN = AnswerForms(forms.THINK, forms.QWEN)
CODER = AnswerForms(forms.THINK, forms.QWEN_CODER)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = ("get_weather", {"city": "Rome"})


def write(content):
    body = json.dumps({"name": "write_file", "arguments": {"path": "a", "content": content}})
    return f"<tool_call>\n{body}\n</tool_call>"


def write_xml(content):
    return (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n"
        f"<parameter=content>\n{content}\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("content", ["</tool_call>", "<tool_call>{}</tool_call>", '"\\</think>'])
def test_a_literal_marker_in_an_argument_is_the_argument(content, by_token):
    found = read_text(QWEN, write(content), by_token=by_token)
    assert calls(found) == [("write_file", {"path": "a", "content": content})]
    assert len(found) == 1


def test_a_literal_marker_in_prose_is_text():
    text = "Close it with </tool_call>, after <tool_call> and JSON. <think> too."
    vocabulary_without_markers = AnswerForms(
        forms.ReasoningForm(Marker("<think>", 1), Marker("</think>", 2)),
        forms.CallForm("", Marker("<tool_call>", 3), Marker("</tool_call>", 4), forms.JsonBody()),
    )
    reader = reader_of(vocabulary_without_markers)
    reader.push(9, text, "")
    reader.finish(ended=True)
    assert joined(reader.parts.take()) == [("text", "", text)]


def test_a_marker_in_prose_that_is_a_token_is_text_if_no_call_follows():
    found = read_text(QWEN, "Write <tool_call> first, then </tool_call>.")
    assert found == [("text", "", "Write <tool_call> first, then </tool_call>.")]


def test_a_call_after_a_marker_in_prose_is_a_call():
    found = read_text(QWEN, f"Write <tool_call> first. {CALL}")
    assert found[0] == ("text", "", "Write <tool_call> first.")
    assert calls(found) == [WEATHER]


@pytest.mark.parametrize("by_token", [True, False])
def test_a_call_inside_reasoning_that_ends_the_answer_is_a_call(by_token):
    for end in ("", "\n</think>\n", f"\n{CALL}"):
        found = read_text(QWEN, f"<think>\nI call.\n{CALL}{end}", by_token=by_token)
        assert found[0] == ("reasoning", "", "I call.")
        assert calls(found) == [WEATHER] * (1 + end.count("Rome"))


@pytest.mark.parametrize("by_token", [True, False])
def test_a_call_that_is_mentioned_in_reasoning_is_reasoning(by_token):
    text = f"<think>\nI could write\n{CALL}\nbut no.\n</think>\nHello"
    found = read_text(QWEN, text, by_token=by_token)
    assert found == [("reasoning", "", f"I could write\n{CALL}\nbut no."), ("text", "", "Hello")]
    found = read_text(QWEN, f"<think>a {CALL}</think>Hello", by_token=by_token)
    assert found == [("reasoning", "", f"a {CALL}"), ("text", "", "Hello")]


@pytest.mark.parametrize("content", [
    write_xml("x"),
    "</parameter>",
    "a\n</parameter>\nb",
    "use <parameter=path> here",
    "<function=f> opens",
    "</tool_call>\nmore",
    "line\n\n",
    "",
])  # fmt: skip
def test_a_parameter_value_that_looks_like_a_call_is_the_value(content):
    found = read_text(CODER, write_xml(content))
    assert calls(found) == [("write_file", {"path": "a", "content": content})]


def test_a_long_file_in_an_xml_parameter_is_whole():
    content = "def f():\n    return '</parameter>'\n" * 20
    for streams in (False, True):
        found = read_text(CODER, write_xml(content), size=7, streams=streams)
        assert calls(found) == [("write_file", {"path": "a", "content": content})]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "many", "many"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/n"}, "3", 3),
        ({"$ref": "#/$defs/nowhere"}, "3", 3),
        ({}, "3", 3),
        ({}, "three", "three"),
        ({"type": "object"}, "NaN", "NaN"),
    ],
)
def test_argument_types_come_from_the_schema(schema, written, value):
    parameters = {"properties": {"x": schema}, "$defs": {"n": {"type": "integer"}}}
    tool = Tool(name="f", parameters=parameters)
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>"
    found = read_text(AnswerForms(call=forms.GLM), text, tools=(tool,))
    assert calls(found) == [("f", {"x": value})]


@pytest.mark.parametrize("body", [
    "{name: get_weather}",
    '{"name": "get_weather", "arguments": {"city": "Rome"}',
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "get weather", "arguments": {}}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": "abc}}',
    "[[1]]",
    "[" * 300,
    "nonsense",
])  # fmt: skip
@pytest.mark.parametrize("by_token", [True, False])
def test_a_malformed_call_is_text(body, by_token):
    text = f"Hm.\n<tool_call>{body}</tool_call>"
    options = {"by_token": by_token}
    assert read_text(QWEN, text, **options) == [("text", "", text)]
    reader = reader_of(QWEN)
    reader.push(1, text, "")
    reader.finish(ended=True)
    assert reader.parts.notes


def test_a_good_call_after_a_malformed_one_is_a_call():
    found = read_text(
        QWEN, f'<tool_call>{{"name": "f", "arguments": {{"x": "abc}}}}</tool_call>{CALL}'
    )
    assert found[0][0] == "text"
    assert calls(found) == [WEATHER]


def test_without_tools_calls_are_text():
    assert read_text(QWEN, CALL, tools=(), by_token=False) == [("text", "", CALL)]


def test_reasoning_without_its_end_is_reasoning():
    assert read_text(QWEN, "Hm. Yes", in_reasoning=True) == [("reasoning", "", "Hm. Yes")]
    assert read_text(QWEN, "Hm.</think>A", in_reasoning=True) == [
        ("reasoning", "", "Hm."),
        ("text", "", "A"),
    ]


def stream_of(text, stops=(), min_tokens=0):
    """Return the stream of a vocabulary of bytes with markers, and the tokens of a text."""
    markers = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    table = BytesTable([bytes([byte]) for byte in range(256)] + [one.encode() for one in markers])
    ids = {marker: 256 + at for at, marker in enumerate(markers)}
    reader = MarkedAnswer(QWEN.with_tokens(ids.get), CallOptions(TOOLS), holds_space=not stops)
    literals = {token: marker for marker, token in ids.items()}
    split = AnswerSplit(reader, "r", 0, literals)
    tokens, rest = [], text.encode()
    while rest:
        marker = next((one for one in markers if rest.startswith(one.encode())), None)
        tokens.append(ids[marker] if marker else rest[0])
        rest = rest[len(marker) if marker else 1 :]
    return TextStream(table.stream(), stops=stops, min_tokens=min_tokens, split=split), tokens


def run(stream, tokens):
    text, parts = "", []
    for count, token in enumerate(tokens, 1):
        text += stream.push(token)
        parts += stream.take_parts()
        if stream.stopped:
            return text, parts, count
    return text + stream.finish(), [*parts, *stream.take_parts()], len(tokens)


def test_marks_count_bytes():
    text, parts, _ = run(*stream_of(f"<think>\nGrüße\n</think>\n\nÄ\n{CALL}"))
    assert text == 'GrüßeÄ{"city": "Rome"}'
    assert parts[:2] == [PartStart(0, "reasoning"), PartStart(7, "text")]
    [call] = parts[2:]
    assert (call.at, call.kind, call.name) == (9, "call", "get_weather")
    assert len(call.call) == 9
    assert call.call.isalnum()
    assert run(*stream_of(CALL))[1][0].call == call.call


def test_stop_texts_apply_to_text_alone():
    content = f"<think>a STOP b</think>c {write('STOP')} d STOP e"
    text, parts, count = run(*stream_of(content, stops=["STOP"]))
    assert text == 'a STOP bc {"path": "a", "content": "STOP"}d '
    assert [part.kind for part in parts] == ["reasoning", "text", "call", "text"]
    assert count < len(stream_of(content)[1])


def test_a_stop_text_does_not_continue_over_a_call():
    text, _, _ = run(*stream_of(f"ST{CALL}OP", stops=["STOP"]))
    assert text.startswith("ST")
    assert text.endswith("OP")


def test_reasoning_tokens_are_counted_with_their_markers():
    stream, tokens = stream_of("<think>abc</think>de")
    run(stream, tokens)
    assert stream.reasoning_tokens == 5


def test_a_replay_at_any_token_continues_in_the_middle_of_an_argument():
    content = f"<think>a</think>b{write('Grüße, </tool_call>')}c"
    whole, parts, _ = run(*stream_of(content))
    tokens = stream_of(content)[1]
    for cut in range(len(tokens)):
        first, _ = stream_of(content)
        sent = "".join(first.push(token) for token in tokens[:cut])
        marks = first.take_parts()
        second, _ = stream_of(content)
        assert "".join(second.push(token) for token in tokens[:cut]) == sent
        assert second.take_parts() == marks
        rest, more, _ = run(second, tokens[cut:])
        assert (sent + rest, marks + more) == (whole, parts)


def test_the_input_of_a_tool_with_a_grammar_is_text():
    tool = Tool(name="patch", grammar=Grammar("regex", ".*"))
    text = "<tool_call>patch<arg_key>input</arg_key><arg_value>5</arg_value></tool_call>"
    found = read_text(AnswerForms(call=forms.GLM), text, tools=(tool,))
    assert calls(found) == [("patch", {"input": "5"})]


def test_a_marker_that_is_no_token_begins_reasoning_only_at_the_beginning():
    for size in (1, 50):
        found = read_text(QWEN, "{<think>a", size=size, by_token=False)
        assert found == [("text", "", "{<think>a")]


@pytest.mark.parametrize(
    "schema",
    [{"type": 5}, {"type": [{}]}, {"enum": 5}, {"anyOf": 7}, {"allOf": [{"type": [[]]}]}, 5],
    ids=str,
)
def test_a_schema_that_is_none_restricts_nothing(schema):
    tool = Tool("f", parameters={"properties": {"x": schema}})
    reader = MarkedAnswer(CODER, CallOptions((tool,)))
    body = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
    reader.push(-1, f"<tool_call>\n{body}\n</tool_call>", "")
    reader.finish(ended=True)
    assert joined(reader.parts.take()) == [("call", "f", '{"x": 1}')]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"function": {"name": "f", "arguments": {"a": "\\ud800"}}}',
    ],
)
def test_half_of_a_character_in_a_call_is_sent_as_text_or_escaped(body):
    found = read_text(QWEN, f"<tool_call>{body}</tool_call>")
    assert "\\ud800" in found[0][2]
    for _, name, text in found:
        (name + text).encode()


def test_reasoning_is_not_cut_within_a_character():
    """A grammar accepts no marker there, so the request would fail."""
    table = BytesTable([b"</think>", b"a", b" \xf0\x9f", b"\x98", b"\x80"])
    known = AnswerForms(forms.ReasoningForm(Marker("<think>", 8), Marker("</think>", 0)))
    reader = MarkedAnswer(known, CallOptions(), in_reasoning=True)
    split = AnswerSplit(reader, max_reasoning=2, end_reasoning=[0])
    stream = TextStream(table.stream(), split=split)
    forced = []
    for token in (1, 2, 3, 4):
        stream.push(token)
        forced.append(list(stream.forced))
    assert forced == [[], [], [], [0]]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("form", [forms.QWEN_CODER, forms.PYTHONIC])
def test_long_values_take_linear_time(form, streams) -> None:
    """With copies of all text, four times the text took 16 times as long."""

    def push(count: int) -> None:
        reader = reader_of(AnswerForms(call=form), streams=streams)
        name = "<function=write_file>\n<parameter=content>\n"
        head = name if form is forms.QWEN_CODER else "[write_file(content='"
        reader.push(-1, form.begin.text + head, "")
        for _ in range(count):
            reader.push(-1, "a line of a file\n" * 4, "")

    assert grows_linearly(push, 6_000)
