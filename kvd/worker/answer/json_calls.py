"""Reads calls written as JSON, in pieces: strings, escapes and brackets show where values end.

Each complete object is checked by a JSON parser, so the scanner itself accepts some invalid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from kvd.worker.answer.forms import JsonBody, NamedBody
from kvd.worker.answer.scanner import FoundCall, Malformed

MAX_DEPTH = 200
"""Deepest nesting of brackets in a call."""
MAX_NAME = 256
_STRING_EVENT = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,\]}]")
_NAME_KEYS = ("name", "function", "tool")
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "tool_call_id", "type", "index")


class JsonValue:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.done = False
        self.in_string = False
        self._escape = False
        self._scalar = False
        self._open = ""
        """Closing brackets that are still missing, the innermost last."""

    def push(self, text: str, at: int) -> int:
        """Read from ``at`` on; return where the value ends, or the text's length."""
        while at < len(text) and not self.done:
            if self.in_string:
                at = self._in_string(text, at)
            elif self._scalar:
                found = _SCALAR_END.search(text, at)
                self.done = found is not None
                at = len(text) if found is None else found.start()
            else:
                at = self._between(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            self._escape = False
            return at + 1
        found = _STRING_EVENT.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escape = True
        else:
            self.in_string = False
            self.done = not self._open
        return found.end()

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self.in_string = True
        elif char in "{[":
            if len(self._open) >= MAX_DEPTH:
                raise Malformed(f"more than {MAX_DEPTH} brackets are open")
            self._open += "}" if char == "{" else "]"
        elif char in "}]":
            if self._open[-1:] != char:
                raise Malformed(f"a bracket {char} closes nothing")
            self._open = self._open[:-1]
            self.done = not self._open
        elif char in "<>":
            raise Malformed(f"{char} is outside a string")
        elif not self._open and not char.isspace():
            self._scalar = True
        return at + 1


class JsonCalls:
    """Reads ``{"name": ..., "arguments": {...}}``, or an array of such objects."""

    def __init__(self, body: JsonBody, is_tool: Callable[[str], bool] | None = None) -> None:
        """``is_tool``: the only allowed names; None: any."""
        self.calls: list[FoundCall] = []
        self.done = False
        self._body = body
        self._is_tool = is_tool
        self._step: Callable[[str, int], int] = self._start
        self._listed = False
        self._value = JsonValue()
        self._key = ""
        self._object: list[str] = []
        """Text of the object so far."""
        self._read: list[str] = []
        """Text of the key or value that is being read."""
        self._call: FoundCall | None = None
        self._early: list[str] | None = None
        """Arguments that came before the name."""
        self._streams = False
        """Whether the value that is being read is passed on as it arrives."""

    def push(self, text: str) -> str:
        at = 0
        while at < len(text) and not self.done:
            at = self._step(text, at)
            if self._call is not None and self._call.complete:
                break
        return text[at:]

    def push_end(self, text: str) -> str:
        if not self._value.in_string:
            raise Malformed("the call ends inside its JSON")
        return self.push(text)

    def _start(self, text: str, at: int) -> int:
        char = text[at]
        if char == "{":
            self._object, self._call, self._early = ["{"], None, None
            self._step = self._next_key
            self._value = JsonValue()
        elif char == "[" and not self._listed:
            self._listed = True
        elif char == "]" and self._listed:
            self.done = True
        elif not (char.isspace() or (char == "," and self._listed)):
            raise Malformed(f"a JSON object is expected, not {char!r}")
        return at + 1

    def _next_key(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._value, self._read = JsonValue(), []
            self._step = self._in_key
            return at
        self._object.append(char)
        if char == "}":
            self._end_object()
        elif not (char.isspace() or char == ","):
            raise Malformed(f"a key is expected, not {char!r}")
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._read.append(text[at:end])
        if self._value.done:
            self._key = str(parse("".join(self._read)))
            self._object += self._read
            known = (self._body.name_key, self._body.arguments_key)
            if self._key not in (*known, *_NAME_KEYS, *_ARGUMENTS_KEYS, *_OTHER_KEYS):
                raise Malformed(f"unknown key {self._key[:50]!r}")
            self._step = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        char = text[at]
        self._object.append(char)
        if char == ":":
            self._value, self._read, self._streams = JsonValue(), [], False
            self._step = self._before_value
        elif not char.isspace():
            raise Malformed(f"a colon is expected, not {char!r}")
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        if text[at].isspace():
            self._object.append(text[at])
            return at + 1
        self._streams = self._key in self._arguments_keys and text[at] == "{"
        if self._streams and self._call is None:
            self._early = []
        self._step = self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        piece = text[at:end]
        self._object.append(piece)
        if not self._streams:
            self._read.append(piece)
        elif self._call is not None:
            self._call.pieces.append(piece)
        elif self._early is not None:
            self._early.append(piece)
        if self._value.done:
            self._step = self._next_key
            if self._key == self._body.name_key:
                self._name("".join(self._read))
        return end

    @property
    def _arguments_keys(self) -> tuple[str, ...]:
        return (self._body.arguments_key, *_ARGUMENTS_KEYS)

    def _name(self, text: str) -> None:
        name = parse(text)
        if isinstance(name, str):
            self._call = self._begin(name)

    def _begin(self, name: str) -> FoundCall:
        check_name(name, self._is_tool)
        call = FoundCall(name, self._early or [])
        self.calls.append(call)
        return call

    def _end_object(self) -> None:
        content = parse("".join(self._object))
        if isinstance(nested := content.get("function"), dict):
            content, self._early = nested, None
        call = self._call
        passed_on = call is not None or self._early is not None
        if call is None:
            name = next((content[key] for key in _NAME_KEYS if key in content), None)
            if not isinstance(name, str):
                raise Malformed("the object has no name")
            call = self._begin(name)
        value = next((content[key] for key in self._arguments_keys if key in content), None)
        if isinstance(value, str):
            check_object(value)
            call.pieces.append(value)
            value = {}
        elif value is None or not passed_on:
            call.pieces.append(as_text(value or {}))
        if value is not None and not isinstance(value, dict):
            raise Malformed("the arguments are no object")
        call.complete = True
        self._step = self._start
        self.done = not self._listed


class NamedCalls:
    """Reads a name and its arguments, such as ``f[ARGS]{"x": 1}``; also what `JsonCalls` reads."""

    def __init__(self, body: NamedBody) -> None:
        self.calls: list[FoundCall] = []
        self.done = False
        self._body = body
        self._head = ""
        # Whitespace in a form is what models write, and any is accepted.
        self._after_name = re.compile(r"\s*".join(map(re.escape, body.after_name.split())))
        self._value = JsonValue()
        self._read: list[str] = []
        self._tail = ""
        """What follows the arguments."""
        self._json: JsonCalls | None = None

    def push(self, text: str) -> str:
        if self._json is not None:
            rest = self._json.push(text)
            self.done = self._json.done
            return rest
        if self._value.done:
            return self._push_tail(text)
        if not self.calls:
            return self._push_head(text)
        return self._push_arguments(text)

    def push_end(self, text: str) -> str:
        if self._json is not None:
            return self._json.push_end(text)
        if self._value.done:  # the closing marker may follow without the body's end
            self.done = True
            return text
        if not self._value.in_string:
            raise Malformed("the call ends inside its JSON")
        return self.push(text)

    def _push_arguments(self, text: str) -> str:
        if not self._read and not (text := text.lstrip()):
            return ""
        end = self._value.push(text, 0)
        self._read.append(text[:end])
        self.calls[0].pieces.append(text[:end])
        if not self._value.done:
            return ""
        check_object("".join(self._read))
        self.calls[0].complete = True
        return self._push_tail(text[end:])

    def _push_tail(self, text: str) -> str:
        self._tail += text
        end, rest = self._body.end.strip(), self._tail.lstrip()
        if rest != end and end.startswith(rest):
            return ""
        self.done = True
        return rest.removeprefix(end) if end else self._tail

    def _push_head(self, text: str) -> str:
        self._head += text
        head = self._head.lstrip()
        if head[:1] in ("[", "{"):
            self._json = JsonCalls(JsonBody())
            self.calls = self._json.calls
            return self.push(head)
        found = self._after_name.search(head)
        if found is None:
            if len(head) > MAX_NAME + len(self._body.after_name):
                raise Malformed("no name precedes the arguments")
            return ""
        name = head[: found.start()].strip().removeprefix(self._body.before_name)
        name = name.split("[CALL_ID]")[0]
        if self._body.numbered:
            name = re.sub(r":\d+\Z", "", name)
        check_name(name)
        self.calls.append(FoundCall(name))
        return self.push(head[found.end() :])


def check_name(name: str, is_tool: Callable[[str], bool] | None = None) -> None:
    """Raise `Malformed` for a name that no tool can have, or that ``is_tool`` rejects."""
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME or set(name) & set(' <>"{}'):
        raise Malformed(f"{name[:50]!r} is no name of a tool")
    if is_tool is not None and not is_tool(name):
        raise Malformed(f"there is no tool {name!r}")


def parse(text: str) -> Any:
    """Return the value of a JSON text; raises `Malformed`."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"invalid JSON: {error}") from error


def as_text(value: Any) -> str:
    """Return a value as JSON that UTF-8 can hold: an escaped half of a character stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode(errors="ignore").decode() == text
    return text if whole else json.dumps(value)


def check_object(text: str) -> None:
    """Raise `Malformed` for a text that is no JSON object, or that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"half of a character: {error}") from error
    if not isinstance(parse(text), dict):
        raise Malformed("the arguments are no object")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
