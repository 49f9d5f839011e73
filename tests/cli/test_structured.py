"""Grammars, schemas and tools of `kvctl`, and what it shows of reasoning and calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvd.client import Client
from kvd.host.home import Home
from protocol import messages as m
from protocol.parts import PartStart
from protocol.tools import ChatOptions, Grammar, Tool, ToolCall
from protocol.types import ChatMessage, Usage
from tests.cli.stub import stub_daemon, well

SCHEMA = '{"type": "object"}'
PARTS = [PartStart(0, "reasoning"), PartStart(5, "text"), PartStart(8, "call", "look", "abc")]
TEXT = 'Hm ëHi {"a": "é"}'
"""Reasoning of 5 bytes, 3 bytes of text, and the arguments of a call."""


def thoughtful(request: m.Request):
    """Answer with reasoning, text and a call, cut between the characters."""
    if not isinstance(request, m.Generate):
        yield from well(request)
        return
    yield m.Accepted(id=request.id, prompt_tokens=3, seed=1)
    done = 0
    for at, character in enumerate(TEXT):
        end = done + len(character.encode())
        parts = [part for part in PARTS if done <= part.at < end]
        yield m.Tokens(id=request.id, index=at, tokens=[at], text=character, parts=parts)
        done = end
    yield m.Done(id=request.id, reason="stop", usage=Usage(3, len(TEXT), reasoning_tokens=2))


def test_generate_reads_grammars_schemas_and_tools_from_files(
    kvctl, home: Home, tmp_path: Path
) -> None:
    grammar, schema, tools = (tmp_path / name for name in ("a.lark", "a.json", "tools.json"))
    grammar.write_text('start: "a"\n')
    schema.write_text(SCHEMA)
    function = {"name": "look", "parameters": {"type": "object"}}
    tools.write_text(json.dumps([{"type": "function", "function": function}, {"name": "go"}]))
    with stub_daemon(home.socket, well) as requests:
        assert kvctl("generate", "demo", "Hi", "--grammar", str(grammar))[0] == 0
        assert kvctl("generate", "demo", "Hi", "--json-schema", str(schema))[0] == 0
        assert kvctl("generate", "demo", "Hi", "--tools", str(tools))[0] == 0
    first, second, third = (it for it in requests if isinstance(it, m.Generate))
    assert first.grammar == Grammar("lark", 'start: "a"\n')
    assert second.grammar == Grammar("json_schema", SCHEMA)
    assert (third.prompt, third.messages) == (None, [ChatMessage("user", "Hi")])
    look = Tool("look", parameters={"type": "object"})
    assert third.chat == ChatOptions(tools=[look, Tool("go")])


@pytest.mark.parametrize(
    ("flag", "content", "says"),
    [
        ("--json-schema", "[]", "is no JSON schema"),
        ("--json-schema", "{", "is not JSON"),
        ("--tools", "{}", "has no list of tools"),
        ("--tools", "[{}]", "has an invalid tool"),
        ("--tools", None, "cannot read"),
    ],
)
def test_a_wrong_file_is_a_usage_error(kvctl, tmp_path: Path, flag, content, says) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_text(content)
    code, _, err = kvctl("generate", "demo", "Hi", flag, str(path))
    assert code == 2
    assert says in " ".join(err.replace("│", "").split())


def test_generate_writes_text_to_stdout_and_reasoning_and_calls_to_stderr(
    kvctl, home: Home
) -> None:
    with stub_daemon(home.socket, thoughtful):
        code, out, err = kvctl("generate", "demo", "Hi")
    assert (code, out) == (0, "Hi ")
    assert err == 'Hm ë\ncall look {"a": "é"}\n'


def test_chat_keeps_text_and_reasoning_in_the_conversation(kvctl, home: Home) -> None:
    with stub_daemon(home.socket, thoughtful) as requests:
        code, out, _ = kvctl("chat", "demo", stdin="Hello\nAnd now?\n")
    assert (code, out) == (0, "Hi \n" * 2)
    last = [it for it in requests if isinstance(it, m.Generate)][-1]
    assert last.messages == [
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "Hi ", reasoning="Hm ë"),
        ChatMessage("user", "And now?"),
    ]


def test_a_completion_has_its_parts_and_calls(home: Home) -> None:
    with stub_daemon(home.socket, thoughtful), Client(home=home.root) as kvd:
        completion = kvd.generate("demo", messages=[("user", "Hi")])
        assert completion.text
    (choice,) = completion.choices
    assert choice.calls == [ToolCall("look", '{"a": "é"}', "abc")]
    assert choice.text_of("reasoning") == "Hm ë"
    assert choice.text_of("text") == "Hi "
