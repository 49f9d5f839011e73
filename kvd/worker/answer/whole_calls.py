"""Reads the bodies of rare forms with mlx-lm's parsers, once they are complete."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from kvd.worker.answer.forms import Marker, WholeBody
from kvd.worker.answer.json_calls import as_text, check_name, check_object
from kvd.worker.answer.scanner import FoundCall, Malformed


class WholeCalls:
    """``tools``: the request's tools, in OpenAI's form, for the types of arguments."""

    def __init__(self, body: WholeBody, end: Marker, tools: Sequence[Any]) -> None:
        self.calls: list[FoundCall] = []
        self.done = False
        self._end = end
        self._tools = tools
        self._pieces: list[str] = []
        """The body as far as it was read."""
        self._tail = ""
        """The end of the text, which may contain the beginning of the end marker."""
        module = importlib.import_module(f"mlx_lm.tool_parsers.{body.parser}")
        self._parse = module.parse_tool_call

    def push(self, text: str) -> str:
        if self._end.token is not None:
            self._pieces.append(text)
            return ""
        text = self._tail + text
        at = text.find(self._end.text)
        cut = max(0, len(text) - len(self._end.text) + 1) if at < 0 else at
        self._pieces.append(text[:cut])
        self._tail = text[cut:]
        if at < 0:
            return ""
        self._read("".join(self._pieces))
        return self._tail

    def push_end(self, text: str) -> str:
        self._read("".join(self._pieces))
        return text

    def _read(self, body: str) -> None:
        try:
            found = self._parse(body, self._tools)
            calls = [
                (str(call["name"]), as_text(call["arguments"] or {}))
                for call in (found if isinstance(found, list) else [found])
            ]
        except Exception as error:  # the parsers raise any error
            raise Malformed(f"{type(error).__name__}: {error}") from error
        for name, arguments in calls:
            check_name(name)
            check_object(arguments)
            self.calls.append(FoundCall(name, [arguments], complete=True))
        self.done = True
