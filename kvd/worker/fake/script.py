"""Scripted answers of the fake model: reasoning, text, tool calls and JSON.

An answer is a function of the request, the seed and the choice. So it is the same after a replay. A
request has a script if it has a grammar, or messages with tools or reasoning. To choose the calls,
put lines such as ``call NAME {"city": "Paris"}`` into the last message of the user. After a result
of a tool the answer is text.
"""

from __future__ import annotations

import hashlib
import random
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvd.worker.fake.sample_json import sample_json
from kvd.worker.fake.tokens import word
from protocol.chat_checks import NAMED
from protocol.tools import ChatOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.parts import PartKind
    from protocol.tools import Grammar, Tool
    from protocol.worker import Submit

_CALL = re.compile(r"^call (\S+) (\{.*\})$", re.MULTILINE)
_LONGEST_PIECE = 4
"""Characters of one token of JSON."""


@dataclass(frozen=True)
class Begins:
    """The part that begins with a token. ``call``: number of the call in the answer."""

    kind: PartKind
    name: str = ""
    call: int = 0


@dataclass(frozen=True)
class ScriptedToken:
    """One token of an answer."""

    text: str
    reasoning: bool = False
    begins: Begins | None = None


def script_of(request: Submit, prompt: bytes, seed: int, choice: int) -> list[ScriptedToken] | None:
    """Return the tokens of a choice; None if the request has no script.

    ``seed``: as in `FakeTokens`; with 0 all choices are equal.
    """
    chat = request.chat if request.messages is not None else ChatOptions()
    if request.grammar is None and chat == ChatOptions():
        return None
    number = choice if seed else 0
    digest = hashlib.blake2b(b"%d %d " % (seed, number) + prompt).digest()
    draw = random.Random(digest)  # noqa: S311 - not for secrets
    return list(_tokens(request, chat, draw))


def _tokens(request: Submit, chat: ChatOptions, draw: random.Random) -> Iterator[ScriptedToken]:
    reasons = chat.reasoning is not False and (
        chat.tools or chat.reasoning or chat.effort or chat.max_reasoning_tokens
    )
    if reasons:
        words = [_word(draw) for _ in range(draw.randint(2, 4))]
        yield from _part(Begins("reasoning"), words[: chat.max_reasoning_tokens], reasoning=True)
    calls = _calls(request, chat, draw)
    if request.grammar is not None and not calls:
        text = _cut(_matching(request.grammar, draw), draw)
        yield from _part(Begins("text") if reasons else None, text)
    elif not calls or chat.tool_choice == "auto":
        words = [_word(draw) for _ in range(draw.randint(1, 3))]
        yield from _part(Begins("text") if reasons else None, words)
    for number, (name, arguments) in enumerate(calls):
        yield from _part(Begins("call", name, number), _cut(arguments, draw))


def _part(
    begins: Begins | None, texts: list[str], *, reasoning: bool = False
) -> Iterator[ScriptedToken]:
    for text in texts:
        yield ScriptedToken(text, reasoning, begins)
        begins = None


def _calls(request: Submit, chat: ChatOptions, draw: random.Random) -> list[tuple[str, str]]:
    """Return name and arguments of each call."""
    if not chat.tools or chat.tool_choice == "none":
        return []
    messages = request.messages or []
    if chat.tool_choice == "auto" and messages[-1].role == "tool":
        return []
    tools = {tool.name: tool for tool in chat.tools}
    if chat.tool_choice.startswith(NAMED):
        name = chat.tool_choice.removeprefix(NAMED)
        tools = {name: tools[name]}
    content = next((one.content for one in reversed(messages) if one.role == "user"), "")
    calls = [found for found in _CALL.findall(content) if found[0] in tools]
    if not calls:
        chosen = [draw.choice(list(tools.values())) for _ in range(draw.randint(1, 2))]
        calls = [(tool.name, _arguments(tool, draw)) for tool in chosen]
    return calls if chat.parallel_tool_calls else calls[:1]


def _arguments(tool: Tool, draw: random.Random) -> str:
    if tool.grammar is not None:
        return msgspec.json.encode({"input": _matching(tool.grammar, draw)}).decode()
    return sample_json({"type": "object"} | tool.parameters, draw)


def _matching(grammar: Grammar, draw: random.Random) -> str:
    """Return JSON that matches, or words: the fake model knows only schemas."""
    match grammar.kind:
        case "json_object":
            return sample_json({"type": "object"}, draw)
        case "json_schema":
            schema = None
            with suppress(ValueError):
                schema = msgspec.json.decode(grammar.value)
            return sample_json(schema, draw)
        case _:
            return _word(draw).strip()


def _word(draw: random.Random) -> str:
    return " " + word(draw.randrange(256))


def _cut(text: str, draw: random.Random) -> list[str]:
    pieces = []
    while text:
        size = draw.randint(1, _LONGEST_PIECE)
        pieces.append(text[:size])
        text = text[size:]
    return pieces
