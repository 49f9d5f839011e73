"""The input of a custom tool, read from the arguments ``{"input": "..."}`` while they arrive.

Sans-io. What was returned never changes: the deltas together are the input.
"""

from __future__ import annotations

import json
import re

import msgspec

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHUNK = re.compile(
    r"""(?: [^"\\]
      | \\[^u]
      | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
      | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) )
    )*""",
    re.VERBOSE,
)
"""Characters of a JSON string up to its end, or up to an escape or a pair of surrogates that needs
more characters."""


class InputReader:
    """Turns arguments of a custom tool, in pieces, into pieces of its input."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._unread = ""
        self._opened = self._closed = False
        self._sent: list[str] = []

    def push(self, text: str) -> str:
        """Take the next piece of the arguments; return the input that it completes."""
        self._arguments.append(text)
        if self._closed:
            return ""
        self._unread += text
        if not self._opened:
            found = _OPENING.match(self._unread)
            if found is None:
                return ""
            self._opened, self._unread = True, self._unread[found.end() :]
        return self._string()

    def finish(self) -> str:
        """Return the rest of the input, for arguments of another form than the expected one."""
        rest = "" if self._opened else _input_of("".join(self._arguments))
        self._sent.append(rest)
        return rest

    @property
    def input(self) -> str:
        return "".join(self._sent)

    def _string(self) -> str:
        found = _CHUNK.match(self._unread)
        assert found is not None, "the pattern matches the empty text"
        ready, self._unread = found[0], self._unread[found.end() :]
        self._closed = self._unread.startswith('"')
        text = _decoded(ready)
        self._sent.append(text)
        return text


class _Arguments(msgspec.Struct):
    input: str


def _input_of(arguments: str) -> str:
    try:
        return msgspec.json.decode(arguments.encode("utf-8", "replace"), type=_Arguments).input
    except msgspec.DecodeError:
        return arguments


def _decoded(content: str) -> str:
    """Return a JSON string's content without escapes; invalid ones stay as they are."""
    if "\\" not in content:
        return content
    try:
        text: str = json.loads(f'"{content}"', strict=False)
    except ValueError:
        return content
    return text.encode("utf-8", "replace").decode()  # half a pair of surrogates is no text
