"""The text of grammars, in llguidance's form: a Lark grammar for the frame, and others inside it.

A grammar covers a whole answer: free reasoning first, then text or tool calls. Markers that are
tokens of their own are matched by their id, so that the same characters in a text are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from llguidance import LLMatcher

from kvd.worker.answer.forms import Marker
from kvd.worker.grammar.patterns import with_exact_patterns
from kvd.worker.grammar.schema_limits import fault_of, fault_of_lark
from protocol.errors import InvalidRequest
from protocol.tools import Grammar

FREE = "/(?s:.*)/"
"""Any text without markers."""
SPACE = r"/[ \n\r\t]{0,4}/"
"""Whitespace around the parts of a frame: models differ in it."""
MAX_PATTERN_CHARS = 1 << 16
"""Characters of a regular expression or a Lark grammar. One of 1 MiB takes 150 MB to compile."""
MAX_FORCED = 1 << 14
"""Characters that a text of a grammar may force, counting repetitions. A matcher holds 350 bytes
for each forced character, so texts that may force more are drawn token by token."""
MAX_DEPTH = 64
"""Depth of a schema. llguidance itself gives up above about 100."""

WHITESPACE = r"( |\n[ \t]{0,40})"
"""Whitespace between JSON tokens: one space, or a line's end and indentation. Without a bound,
models can write spaces until ``max_tokens``; the embedded model does."""

_REPEATED = re.compile(r"\{([0-9]{1,9})")
"""The least count of a repetition."""


def quoted(text: str) -> str:
    """Return a text as a Lark string; empty for no text."""
    return json.dumps(text) if text else ""


@dataclass
class Source:
    """The grammar of one answer, while it is written."""

    special: Mapping[str, int]
    """Special tokens and markers by their text."""
    rules: list[str] = field(default_factory=list)
    inner: list[dict[str, Any]] = field(default_factory=list)

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule; return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, which may combine expressions with ``&`` and ``~``; return its name."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def is_special(self, text: str) -> bool:
        """Return whether a text contains a special token, which no expression matches."""
        return any(name in text for name in self.special if name)

    def nest(self, grammar: dict[str, Any]) -> str:
        """Add a grammar that rules refer to by the returned name."""
        name = f"g{len(self.inner)}"
        self.inner.append({**grammar, "name": name})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """Return a text as a sequence of strings and of special tokens that it names."""
        names = sorted(filter(None, self.special), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        known = [
            f"<[{self.special[piece]}]>" if piece in self.special else quoted(piece)
            for piece in pieces
            if piece
        ]
        return " ".join(known)

    def marker(self, marker: Marker) -> str:
        if marker.token is not None:
            return f"<[{marker.token}]>"
        return self.literal(marker.text)

    def until(self, marker: Marker) -> str:
        """Return free text that ends with the first of a marker."""
        if marker.token is not None or marker.text in self.special:
            return f"{FREE} {self.marker(marker)}"
        return self.rule(f"/(?s:.*){regex_of(marker.text)}/", lazy=True)

    def text(self, start: str, *, canonical: bool) -> str:
        """Return the whole grammar, whose answer is ``start``."""
        canonical = canonical and not any(map(_forces_much, _texts([self.rules, self.inner])))
        options = "" if canonical else '%llguidance {"no_forcing": true}'
        lark = "\n".join([options, f"start: {start}", *self.rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.inner]})


def _texts(value: Any) -> Iterator[str]:
    """Return the texts in which a lexeme may be written: lines of Lark, and strings in schemas."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield from one.split("\n")
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one


def _forces_much(text: str) -> bool:
    """Return whether a text may force more than `MAX_FORCED` characters."""
    most = len(text)
    if most <= MAX_FORCED and "{" not in text:  # an enumeration has thousands of texts
        return False
    for count in _REPEATED.findall(text):
        most *= max(1, int(count))
        if most > MAX_FORCED:
            return True
    return most > MAX_FORCED


def regex_of(text: str) -> str:
    """Return a text as a part of a Lark regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")


def inner_grammar(grammar: Grammar, name: str = "grammar") -> dict[str, Any]:
    """Return a client's grammar in llguidance's form; ``name``: the field, for errors."""
    if grammar.kind == "json_object":
        return json_grammar({"type": "object"}, name)
    if not grammar.value:
        raise InvalidRequest(f"{name}.value is empty; a {grammar.kind} needs one", field=name)
    if grammar.kind in {"regex", "lark"} and len(grammar.value) > MAX_PATTERN_CHARS:
        raise InvalidRequest(
            f"{name}.value has {len(grammar.value)} characters; a {grammar.kind} takes at most"
            f" {MAX_PATTERN_CHARS}",
            field=name,
        )
    if grammar.kind == "regex":
        known: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(grammar.value))
        return {"lark_grammar": known["grammars"][0]["lark_grammar"]}
    if grammar.kind == "lark":
        if (fault := fault_of_lark(grammar.value)) is not None:
            raise InvalidRequest(f"{name}.value cannot be used: {fault}; simplify it", field=name)
        return {"lark_grammar": grammar.value}
    try:
        schema = msgspec.json.decode(grammar.value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name}.value is not JSON: {error}", field=name) from error
    return json_grammar(schema, name)


def json_grammar(schema: Any, name: str) -> dict[str, Any]:
    """Return the grammar of JSON by a schema.

    Raises `InvalidRequest` if it is none, too deep, or beyond `kvd.worker.grammar.schema_limits`.
    ``name``: the field, for errors.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            f"the JSON schema in {name} is of type {type(schema).__name__}; give an object",
            field=name,
        )
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                children += value.values() if isinstance(value, dict) else value
        if not children:
            if (fault := fault_of(schema)) is not None:
                raise InvalidRequest(
                    f"the JSON schema in {name} cannot be used: {fault}; simplify it", field=name
                )
            options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            found = with_exact_patterns(schema)
            return {"json_schema": {**options, **found} if isinstance(found, dict) else found}
        level = children
    raise InvalidRequest(
        f"the JSON schema in {name} is nested more than {MAX_DEPTH} levels deep; use $ref",
        field=name,
    )
