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
from kvd.worker.answer.typed import as_allowed, as_json, parameter_types, quoted

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
        """Text that was not read yet; in a value, its end."""
        self._step: Callable[[], bool] = self._before_name
        self._end = body.end.strip()
        self._after_name = body.after_name.split()
        self._after_keys = [one.split() for one in (body.after_key, body.after_json_key) if one]
        self._close = body.after_value.strip()
        closing = self._end or form.end.text
        self._follows = (body.before_key.strip(), closing)
        """What may follow a value."""
        self._opening = (body.before_name or form.begin.text, closing)
        self._types: set[str] = set()
        self._is_first = True
        self._searched = 0
        """Characters of the text in which the value cannot end."""
        # A line break before the closing tag is a part of it; a quoted call's tags may be cut.
        self._kept = max(map(len, self._opening)) if self._quotes_calls else 1
        self._is_json = False
        """Whether the form says that the value is JSON."""
        self._value_streams = False
        """Whether the value is a string that is passed on as it arrives."""
        self._value_pieces: list[str] = []
        """The value as far as it was read, if it does not stream."""
        self._is_empty = True
        """Whether the value has no character yet."""
        self._line_break = True
        """Whether a line break at the value's beginning is the form's."""
        self._open_calls = 0
        """Calls that the value quotes, less their ends."""

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
        self._searched = self._open_calls = 0
        self._value_pieces, self._is_empty, self._line_break = [], True, True
        before = self._text
        for is_json, parts in enumerate(self._after_keys):
            self._is_json = bool(is_json)
            self._value_streams = self._streams and self._types == {"string"} and not is_json
            try:
                return self._skip_all(parts, self._value)
            except Malformed:
                self._text = before
                if parts is self._after_keys[-1]:
                    raise
        return False

    def _value(self) -> bool:
        end = self._find_end()
        if end is None:
            self._read(max(0, self._searched - self._kept))
            return False
        rest = self._text[end + len(self._close) :]
        text = self._text[:end]
        if self._body.after_value.startswith("\n"):
            text = text.removesuffix("\n")
        self._add(text)
        pieces = self.calls[0].pieces
        if not self._value_streams:
            pieces.append(self._typed("".join(self._value_pieces)))
        else:
            pieces.append('""' if self._is_empty else '"')
        self._text, self._step = rest, self._key
        return True

    def _typed(self, text: str) -> str:
        """Return a value as JSON of the type that the form or the tool's schema demands."""
        if self._is_json:
            return as_json(text)
        marks_strings = len(self._after_keys) > 1 and (not self._types or "string" in self._types)
        return quoted(text) if marks_strings else as_allowed(text, self._types)

    def _read(self, size: int) -> None:
        """Move the first characters of the text to the value."""
        if self._quotes_calls:
            opening, closing = (
                self._text.count(tag, 0, size + len(tag) - 1) for tag in self._opening
            )
            self._open_calls += opening - closing
        self._add(self._text[:size])
        self._text = self._text[size:]
        self._searched -= size

    def _add(self, text: str) -> None:
        """Add a piece to the value, except the line break that the form puts before it."""
        if self._is_empty and self._body.after_key.endswith("\n") and self._line_break:
            self._line_break = not text
            text = text.removeprefix("\n")
        if not text:
            return
        if self._value_streams:
            self.calls[0].pieces.append(quoted(text)[int(not self._is_empty) : -1])
        else:
            self._value_pieces.append(text)
        self._is_empty = False

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
        if not self._quotes_calls:
            return False
        opening, closing = (self._text.count(tag, 0, at) for tag in self._opening)
        return self._open_calls + opening - closing > 0

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
