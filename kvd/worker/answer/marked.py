"""Answers whose parts are between markers, such as ``<think>`` and ``<tool_call>``.

Whitespace next to a marker belongs to no part. A call inside reasoning counts if nothing but the
reasoning's end follows it; otherwise it is reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.worker.answer.forms import (
    AnswerForms,
    CallForm,
    JsonBody,
    Marker,
    NamedBody,
    XmlBody,
)
from kvd.worker.answer.json_calls import JsonCalls, NamedCalls
from kvd.worker.answer.open_call import OpenCall, Symbol
from kvd.worker.answer.parts import Parts
from kvd.worker.answer.scanner import FoundCall, Malformed, Scanner
from kvd.worker.answer.tools import as_openai, parameters_of
from kvd.worker.answer.whole_calls import WholeCalls
from kvd.worker.answer.xml_calls import XmlCalls
from protocol.parts import PartKind
from protocol.tools import Tool

_MAX_RESCANS = 32
"""How often the end of an answer is read again after a call that is not closed."""


@dataclass(frozen=True)
class CallOptions:
    """What a reader knows about the calls of a request."""

    tools: Sequence[Tool] = ()
    """Tools that may be called; empty: calls are text."""
    streams: bool = False
    """Whether arguments are passed on as they arrive, because a grammar keeps them valid."""


class MarkedAnswer:
    """Reads one answer. ``in_reasoning``: whether the prompt began the reasoning.

    ``holds_space``: whether whitespace is held back until it is known what follows.
    """

    def __init__(
        self,
        forms: AnswerForms,
        options: CallOptions,
        *,
        in_reasoning: bool = False,
        holds_space: bool = True,
    ) -> None:
        self.parts = Parts()
        self._reasoning_form = forms.reasoning
        self._form = forms.call if options.tools else None
        self._options = options
        self._kind: PartKind = "reasoning" if in_reasoning else "text"
        self._holds_space = holds_space
        self._drops_space = in_reasoning
        self._space = ""
        """Whitespace at the end of the text, which is dropped if a marker follows."""
        self._pending = ""
        """End of the text, which may be the beginning of a marker."""
        self._call: OpenCall | None = None
        self._unmarked = True
        """Whether a call without an opening marker may begin."""
        self._quotes_calls = True
        """Whether calls that are quoted in a value are skipped (`XmlCalls`)."""
        self._tentative: list[FoundCall] = []
        """Calls inside reasoning."""
        self._tentative_text = ""
        markers = AnswerForms(forms.reasoning, self._form).markers
        self._by_token = {one.token: one for one in markers if one.token is not None}
        self._composed = [one for one in markers if one and one.token is None]
        """Markers of several tokens, some of which may be special tokens."""

    @property
    def reasoning(self) -> bool:
        return self._kind == "reasoning"

    def push(self, token: int, text: str, literal: str) -> None:
        self._push(Symbol(text, literal, self._by_token.get(token)))

    def finish(self, *, ended: bool) -> None:
        for _ in range(_MAX_RESCANS):
            if self._call is None:
                break
            self._finish_call(self._call, ended=ended)
        if self._call is not None:
            rest = "".join(symbol.text + symbol.literal for symbol in self._call.symbols)
            self._emit(self._call.opening + rest)
        pending, self._pending = self._pending, ""
        self._emit(pending)
        if self._tentative:
            for call in self._tentative:
                self.parts.call(call)
        elif self._kind == "text" and not self._drops_space:
            self.parts.text("text", self._space)
        self._space = ""

    def _push(self, symbol: Symbol) -> None:
        if self._call is not None:
            self._push_call(symbol)
            return
        text, literal = symbol.text, symbol.literal
        if symbol.marker is None and any(literal in marker.text for marker in self._composed):
            text, literal = text + literal, ""
        if self._push_prose(text):
            self._push_call(Symbol("", literal, symbol.marker))
        elif symbol.marker is not None:
            pending, self._pending = self._pending, ""
            self._emit(pending)
            self._read_marker(symbol.marker)

    # Reasoning and text.

    def _push_prose(self, text: str) -> bool:
        """Read text outside a call; return whether a call is open after it."""
        self._pending += text
        while self._pending and self._call is None:
            if self._begins_unmarked(self._pending):
                self._open_call("")
                break
            at, marker = self._find_marker()
            if marker is None:
                self._emit(self._pending[:at])
                self._pending = self._pending[at:]
                break
            self._emit(self._pending[:at])
            self._pending = self._pending[at + len(marker.text) :]
            self._read_marker(marker)
        return self._call is not None

    def _begins_unmarked(self, text: str) -> bool:
        """Return whether a call without an opening marker begins with the answer's text."""
        if self._form is None or self._form.opening or self._kind != "text":
            return False
        return self._unmarked and self.parts.empty and text.lstrip()[:1] in ("{", "[")

    def _find_marker(self) -> tuple[int, Marker | None]:
        """Return the first marker that is found by its text, and where it is.

        Without one: the end of the text that cannot be the beginning of a marker.
        """
        text, cut = self._pending, len(self._pending)
        first: tuple[int, Marker] | None = None
        begin = None if self._reasoning_form is None else self._reasoning_form.begin
        for marker in self._textual():
            at = text.find(marker.text)
            if marker == begin and text[: max(at, 0)].strip():
                continue  # it counts only at the beginning
            if at >= 0 and (first is None or at < first[0]):
                first = at, marker
            for size in range(min(len(marker.text) - 1, len(text)), 0, -1):
                if text.endswith(marker.text[:size]):
                    cut = min(cut, len(text) - size)
                    break
        return first or (cut, None)

    def _textual(self) -> Iterable[Marker]:
        """Yield the markers that count now and are no tokens."""
        form = self._reasoning_form
        if form is not None:
            if self._kind == "reasoning" and form.end.token is None:
                yield form.end
            elif self.parts.empty and not self._tentative and form.begin.token is None:
                yield form.begin
        if self._form is not None and self._form.opening and self._form.opening.token is None:
            yield self._form.opening

    def _read_marker(self, marker: Marker) -> None:
        reasoning, form = self._reasoning_form, self._form
        if form is not None and marker == form.opening:
            self._open_call(marker.text)
        elif reasoning is not None and marker in (reasoning.begin, reasoning.end):
            self._space = ""
            self._kind = "reasoning" if marker == reasoning.begin else "text"
            self._drops_space = True
        else:  # a marker of a call that is not open
            self._emit(marker.text)

    def _emit(self, text: str) -> None:
        if self._drops_space:
            text = text.lstrip()
        if not text:
            return
        text, self._space = self._space + text, ""
        self._drops_space = False
        if self._holds_space or self._kind == "reasoning":
            kept = text.rstrip()
            text, self._space = kept, text[len(kept) :]
        if text:
            self._give_up_tentative()
            self.parts.text(self._kind, text)

    def _give_up_tentative(self) -> None:
        if self._tentative:
            self.parts.text("reasoning", self._tentative_text)
            self._tentative, self._tentative_text = [], ""

    # Calls.

    def _open_call(self, opening: str) -> None:
        form = self._form
        assert form is not None
        space, self._space = self._space, ""
        self._call = self._new_call(form, space + opening)
        pending, self._pending = self._pending, ""
        if pending:
            self._push_call(Symbol(pending))

    def _new_call(self, form: CallForm, opening: str) -> OpenCall:
        return OpenCall(form, self._scanner, opening, in_section=form.section is not None)

    def _scanner(self) -> Scanner:
        form, tools = self._form, self._options.tools
        assert form is not None
        body = form.body
        names = {tool.name: parameters_of(tool) for tool in tools}
        if isinstance(body, JsonBody):
            return JsonCalls(body, None if form.opening else names.__contains__)
        if isinstance(body, NamedBody):
            return NamedCalls(body)
        if isinstance(body, XmlBody):
            return XmlCalls(
                form,
                body,
                lambda name: names.get(name, {}),
                streams=self._streams,
                quotes_calls=self._quotes_calls and not self._streams,
            )
        return WholeCalls(body, form.end, [as_openai(tool) for tool in tools])

    @property
    def _streams(self) -> bool:
        return self._options.streams and self._kind == "text"

    def _push_call(self, symbol: Symbol) -> None:
        call = self._call
        assert call is not None
        try:
            call.push(symbol)
        except Malformed as error:
            self._take_calls(call)
            self._fail(call, str(error))
            return
        self._take_calls(call)
        if call.over:
            self._call = None
            self._drops_space = not self._tentative
            self._push_all(call.left)

    def _push_all(self, symbols: Iterable[Symbol]) -> None:
        for symbol in symbols:
            self._push(symbol)

    def _take_calls(self, call: OpenCall) -> None:
        """Pass on the calls that are complete, and the open one if calls are streamed."""
        found, text = call.take()
        if self._kind == "reasoning":
            self._tentative += found
            self._tentative_text += text
            return
        for complete in found:
            self._pass_on(call, complete)
            call.begun = False
        if self._streams and call.partial is not None:
            self._pass_on(call, call.partial)

    def _pass_on(self, call: OpenCall, found: FoundCall) -> None:
        self._give_up_tentative()
        if call.begun:
            self.parts.more(found)
        else:
            self.parts.call(found)
            call.begun = True

    def _fail(self, call: OpenCall, reason: str) -> None:
        """Pass on a malformed call as text: read it again, without its opening marker."""
        self._call = None
        if call.has_text:
            self.parts.note(reason)
        self._unmarked = False
        self._drops_space = False
        self._emit(call.opening)
        self._push_all(call.symbols)

    def _finish_call(self, call: OpenCall, *, ended: bool) -> None:
        partial = call.partial
        if not call.in_body or not (ended or call.has_text):
            self._call = None
        elif not ended and partial is not None and self._kind == "text":
            self._pass_on(call, partial)
            self._call = None
        elif self._quotes_calls and self._form is not None and isinstance(self._form.body, XmlBody):
            self._quotes_calls = False
            self._call = self._new_call(self._form, call.opening)
            self._push_all(call.symbols)
        else:
            self._fail(call, "the answer ends inside a call")
