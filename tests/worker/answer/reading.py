"""Reads sample answers: as tokens of any size, with markers that are tokens or text."""

from __future__ import annotations

import dataclasses
import json

from kvd.worker.answer import forms
from kvd.worker.answer.harmony import HarmonyAnswer
from kvd.worker.answer.marked import CallOptions, MarkedAnswer
from kvd.worker.answer.parts import Begin
from protocol.tools import Tool

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "units": {"type": "array"},
        },
    },
)
WRITE = Tool(
    name="write_file",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    },
)
TOOLS = (WEATHER, WRITE)


@dataclasses.dataclass(frozen=True)
class Token:
    id: int
    text: str
    literal: str


class Vocabulary:
    """Gives ids to markers, and splits sample texts into tokens."""

    def __init__(self, known, extra=()):
        self.ids = {}
        self.forms = known.with_tokens(self._id)
        for text in extra:
            self._id(text)

    def _id(self, text):
        return self.ids.setdefault(text, 1000 + len(self.ids))

    def tokens(self, text, size=1):
        """Return tokens of at most ``size`` characters, and of whole markers."""
        found, plain = [], ""
        while text:
            marker = next((one for one in self.ids if text.startswith(one)), None)
            if marker is not None or len(plain) == size:
                if plain:
                    found.append(Token(1, plain, ""))
                plain = ""
            if marker is None:
                plain, text = plain + text[0], text[1:]
            else:
                found.append(Token(self.ids[marker], "", marker))
                text = text[len(marker) :]
        return [*found, *([Token(1, plain, "")] if plain else [])]


def reader_of(known, *, tools=TOOLS, streams=False, in_reasoning=False, opening="assistant"):
    options = CallOptions(tools, streams)
    if known.harmony is not None:
        return HarmonyAnswer(known.harmony, options, opening)
    return MarkedAnswer(known, options, in_reasoning=in_reasoning)


def joined(found):
    """Return ``[(kind, name, text)]``."""
    parts = []
    for one in found:
        if isinstance(one, Begin):
            parts.append([one.kind, one.name, ""])
        else:
            if not parts:
                parts.append(["text", "", ""])
            parts[-1][2] += one
    return [tuple(part) for part in parts]


def read(reader, tokens, *, ended=True):
    found = []
    for token in tokens:
        reader.push(token.id, token.text, token.literal)
        found += reader.parts.take()
    reader.finish(ended=ended)
    return joined(found + reader.parts.take())


def read_text(known, text, *, size=1, by_token=True, extra=(), ended=True, **options):
    """Read a sample with markers that are tokens, or are found by their text."""
    vocabulary = Vocabulary(known if by_token else forms.AnswerForms(), extra if by_token else ())
    reader = reader_of(vocabulary.forms if by_token else known, **options)
    return read(reader, vocabulary.tokens(text, size), ended=ended)


def calls(parts):
    """Return ``[(name, arguments)]``."""
    return [(name, json.loads(text)) for kind, name, text in parts if kind == "call"]
