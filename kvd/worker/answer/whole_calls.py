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
        self._text = ""
        module = importlib.import_module(f"mlx_lm.tool_parsers.{body.parser}")
        self._parse = module.parse_tool_call

    def push(self, text: str) -> str:
        self._text += text
        if self._end.token is not None:
            return ""
        at = self._text.find(self._end.text)
        if at < 0:
            return ""
        body, rest = self._text[:at], self._text[at:]
        self._read(body)
        return rest

    def push_end(self, text: str) -> str:
        self._read(self._text)
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
