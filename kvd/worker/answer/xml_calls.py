"""Reads calls whose arguments are pairs of key and value, in pieces.

Strings are written without escapes, so a value may contain its own closing tag. A value therefore
ends at the closing tag that another key, or the end of the call, follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvd.worker.answer.forms import CallForm, XmlBody
from kvd.worker.answer.json_calls import check_name
from kvd.worker.answer.scanner import FoundCall, Malformed
from kvd.worker.answer.typed import as_json, parameter_types, quoted

_NAME = re.compile(r'[^\s<>"]+')
_KEY = re.compile(r'[^<>"\n]+')


class XmlCalls:
    """One call. ``parameters_of`` returns the schema of a tool's arguments, or ``{}``.

    ``streams``: whether strings are passed on as they arrive. ``quotes_calls``: whether a call that
    a value quotes is skipped as a whole, so that its tags do not end the value.
    """

    def __init__(
        self,
        form: CallForm,
        body: XmlBody,
        parameters_of: Callable[[str], Mapping[str, Any]],
        *,
        streams: bool,
        quotes_calls: bool,
    ) -> None:
        self.calls: list[FoundCall] = []
        self.done = False
        self._body = body
        self._parameters_of = parameters_of
        self._streams = streams
        self._quotes_calls = quotes_calls
        self._text = ""
        """Text that was not read yet; in a value, all of it."""
        self._step: Callable[[], bool] = self._before_name
        self._end = body.end.strip()
        self._after_name = body.after_name.split()
        self._after_key = body.after_key.split()
        self._close = body.after_value.strip()
        closing = self._end or form.end.text
        self._follows = (body.before_key.strip(), closing)
        """What may follow a value."""
        self._opening = (body.before_name or form.begin.text, closing)
        self._types: set[str] = set()
        self._is_first = True
        self._searched = 0
        """Characters of the value in which it cannot end."""
        self._sent = 0
        """Characters of the value that were passed on, or dropped before it."""
        self._quoted = False
        """Whether the value's opening quote was passed on."""

    def push(self, text: str) -> str:
        self._text += text
        while not self.done and self._step():
            pass
        return self._text if self.done else ""

    def push_end(self, text: str) -> str:
        return self.push(text)

    def _before_name(self) -> bool:
        return self._skip_all(self._body.before_name.split(), self._name)

    def _name(self) -> bool:
        rest = self._text.lstrip()
        found = _NAME.match(rest)
        if found is None:
            if rest:
                raise Malformed(f"a name is expected, not {rest[:20]!r}")
            return False
        if found.end() == len(rest):
            return False
        check_name(found[0])
        self.calls.append(FoundCall(found[0], ["{"]))
        self._text = rest[found.end() :]
        self._step = self._head_end
        return True

    def _head_end(self) -> bool:
        return self._skip_all(self._after_name, self._key)

    def _key(self) -> bool:
        rest = self._text.lstrip()
        before, closing = self._follows
        if rest.startswith(before):
            name = rest[len(before) :]
            found = _KEY.match(name)
            if found is None and name:
                raise Malformed(f"a key is expected, not {name[:20]!r}")
            if found is None or found.end() == len(name):
                return False
            key = found[0].strip()
            call = self.calls[0]
            self._types = parameter_types(self._parameters_of(call.name), key)
            call.pieces.append(f"{'' if self._is_first else ', '}{json.dumps(key)}: ")
            self._text, self._step = name[found.end() :], self._key_end
            return True
        if rest.startswith(closing):
            self.calls[0].pieces.append("}")
            self.calls[0].complete = self.done = True
            self._text = rest.removeprefix(self._end)
            return False
        if not (before.startswith(rest) or closing.startswith(rest)):
            raise Malformed(f"a parameter is expected, not {rest[:20]!r}")
        return False

    def _key_end(self) -> bool:
        self._is_first = False
        self._searched = self._sent = 0
        self._quoted = False
        return self._skip_all(self._after_key, self._value)

    def _value(self) -> bool:
        end = self._find_end()
        streams = self._streams and self._types == {"string"}
        pieces = self.calls[0].pieces
        if end is None:
            if streams:
                self._send(pieces, self._searched)
            return False
        if streams:
            self._send(pieces, end)
            pieces.append('"' if self._quoted else '""')
        else:
            pieces.append(as_json(self._trimmed(self._text[:end]), self._types))
        self._text, self._step = self._text[end + len(self._close) :], self._key
        return True

    def _send(self, pieces: list[str], end: int) -> None:
        """Pass on the value before ``end``, except line breaks that belong to the form."""
        text = self._text[self._sent : end]
        if not self._sent and self._body.after_key.endswith("\n") and text.startswith("\n"):
            text, self._sent = text[1:], 1
        if self._body.after_value.startswith("\n"):
            text = text.removesuffix("\n")
        if text:
            pieces.append(quoted(text)[int(self._quoted) : -1])
            self._quoted = True
            self._sent += len(text)

    def _find_end(self) -> int | None:
        """Return where the value ends; None: more text is needed."""
        while (at := self._text.find(self._close, self._searched)) >= 0:
            rest = self._text[at + len(self._close) :].lstrip()
            if any(rest.startswith(follow) for follow in self._follows):
                if not self._inside(at):
                    return at
            elif any(follow.startswith(rest) for follow in self._follows):
                self._searched = at
                return None
            self._searched = at + 1
        self._searched = max(self._searched, len(self._text) - len(self._close) + 1)
        return None

    def _inside(self, at: int) -> bool:
        """Return whether a call that the value quotes is still open at ``at``."""
        opening, closing = self._opening
        value = self._text[:at]
        return self._quotes_calls and value.count(opening) > value.count(closing)

    def _trimmed(self, value: str) -> str:
        """Remove the line breaks that the form puts around a value."""
        if self._body.after_key.endswith("\n"):
            value = value.removeprefix("\n")
        if self._body.after_value.startswith("\n"):
            value = value.removesuffix("\n")
        return value

    def _skip_all(self, parts: list[str], then: Callable[[], bool]) -> bool:
        before = self._text
        for part in parts:
            if not self._skip(part):
                self._text = before
                return False
        self._step = then
        return True

    def _skip(self, expected: str) -> bool:
        """Skip whitespace and this text; return whether it was complete."""
        rest = self._text.lstrip()
        if rest.startswith(expected):
            self._text = rest[len(expected) :]
            return True
        if not expected.startswith(rest):
            raise Malformed(f"{expected!r} is expected, not {rest[: len(expected)]!r}")
        return False
