"""Answers of gpt-oss: a sequence of messages, whose headers name a channel and a recipient."""

from __future__ import annotations

import re

from kvd.worker.answer.forms import HarmonyForm, Marker
from kvd.worker.answer.json_calls import check_name, check_object
from kvd.worker.answer.marked import CallOptions
from kvd.worker.answer.parts import Parts
from kvd.worker.answer.scanner import FoundCall, Malformed
from protocol.parts import PartKind

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyAnswer:
    """Reads one answer. ``opening``: the end of the prompt, after its last ``<|start|>``."""

    def __init__(self, form: HarmonyForm, options: CallOptions, opening: str) -> None:
        self.parts = Parts()
        self._form = form
        self._options = options
        self._markers = (form.start, form.channel, form.message, form.end, form.call)
        self._header: list[str] | None = []
        """Text of the header so far; None: inside a message."""
        self._kind: PartKind = "text"
        self._call: FoundCall | None = None
        self._begun = False
        self._body: list[str] = []
        """Text of a call's message, until it is known to be valid."""
        head, message, body = opening.partition(form.message.text)
        if head:
            self._header = [head]
        if message:
            self._begin_message()
            self._text(body)

    @property
    def reasoning(self) -> bool:
        return self._kind == "reasoning"

    def push(self, token: int, text: str, literal: str) -> None:
        marker = next((one for one in self._markers if one.token == token), None)
        self._text(text)
        if marker is not None:
            self._marker(marker)
        elif self._header is not None:
            self._header.append(literal)

    def finish(self, *, ended: bool) -> None:
        if self._header is not None:
            header = "".join(self._header)
            # Without a single marker, the answer is its text.
            self.parts.text("text", "" if self._form.channel.text in header else header)
            self._header = None
        self._end_message(ended=ended)

    def _marker(self, marker: Marker) -> None:
        form = self._form
        if marker == form.message and self._header is not None:
            self._begin_message()
        elif marker in (form.start, form.channel) and self._header is not None:
            self._header.append(marker.text)
        elif marker != form.message:
            self._end_message(ended=True)
            self._header = [marker.text] if marker in (form.start, form.channel) else []
            self._kind = "text"

    def _text(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
        elif self._call is None:
            self.parts.text(self._kind, text)
        elif text:
            self._body.append(text)
            self._call.pieces.append(text)
            if self._options.streams:
                self._pass_on(self._call)

    def _begin_message(self) -> None:
        header = "".join(self._header or [])
        self._header = None
        self._begun, self._body = False, []
        channel = header.partition(self._form.channel.text)[2].split(maxsplit=1)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._options.tools:
            name = recipient[1].partition("<")[0].removeprefix("functions.")
            self._call, self._kind = FoundCall(name), "call"
        else:
            is_reasoning = bool(channel) and channel[0].startswith(self._form.reasoning)
            self._call, self._kind = None, "reasoning" if is_reasoning else "text"

    def _end_message(self, *, ended: bool) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        body = "".join(self._body)
        try:
            check_name(call.name)
            if ended:
                check_object(body or "{}")
        except Malformed as error:
            self.parts.note(str(error))
            if not self._begun:
                self.parts.text("text", body)
            return
        if not body:
            call.pieces.append("{}")
        self._pass_on(call)

    def _pass_on(self, call: FoundCall) -> None:
        if self._begun:
            self.parts.more(call)
        else:
            self.parts.call(call)
            self._begun = True
