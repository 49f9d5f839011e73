"""The calls between an opening marker and the end of their section, while they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvd.worker.answer.forms import CallForm, Marker
from kvd.worker.answer.scanner import FoundCall, Malformed, Scanner


class Symbol(NamedTuple):
    """One token of an answer, or a piece of text."""

    text: str
    literal: str = ""
    """Text of a marker or another special token, after ``text``."""
    marker: Marker | None = None


class OpenCall:
    """Reads calls up to the end that their form defines."""

    def __init__(
        self, form: CallForm, new_scanner: Callable[[], Scanner], opening: str, *, in_section: bool
    ) -> None:
        """Begin after an opening marker.

        ``opening``: the marker's text, with whitespace before it.

        ``in_section``: whether the form's section is open and another call may follow.
        """
        self.opening = opening
        self.symbols: list[Symbol] = []
        """Symbols that were read since the opening marker, or since the last complete call."""
        self.over = False
        self.left: list[Symbol] = []
        """What follows the calls, once they are over."""
        self.found: list[FoundCall] = []
        """Complete calls that were not taken yet."""
        self.begun = False
        """Whether the open call was passed on already, as far as it was read."""
        self._form = form
        self._new_scanner = new_scanner
        self._scanner = new_scanner()
        self._rest = ""
        self._consumed = ""
        self._step = self._in_section if in_section else self._in_body

    @property
    def partial(self) -> FoundCall | None:
        """The open call, if its name is known."""
        calls = self._scanner.calls
        return calls[-1] if calls and not calls[-1].complete else None

    @property
    def in_body(self) -> bool:
        return self._step == self._in_body

    @property
    def has_text(self) -> bool:
        return any((symbol.text + symbol.literal).strip() for symbol in self.symbols)

    def take(self) -> tuple[list[FoundCall], str]:
        """Return the complete calls, and the text that they were read from."""
        found, self.found = self.found, []
        text, self._consumed = self._consumed, ""
        return found, text

    def push(self, symbol: Symbol) -> None:
        """Read a symbol; raises `Malformed`, after complete calls were added to ``found``."""
        self.symbols.append(symbol)
        literal, tail = symbol.literal, [Symbol("", symbol.literal, symbol.marker)]
        if self._advance(symbol.text):
            self.left = [Symbol(self._rest), *tail]
            return
        if literal and self.in_body and symbol.marker == self._form.end:
            self._collect(self._scanner.push_end(literal))
            literal = ""
        if self._advance(literal):
            rest = self._rest.removesuffix(literal) if literal else self._rest
            self.left = [Symbol(rest)] if rest == self._rest else [Symbol(rest), *tail]

    def _advance(self, text: str) -> bool:
        """Read text; return whether the calls are over."""
        self._rest += text
        while not self.over and self._step():
            pass
        if self.over:
            self._consumed += self._text_before(self._rest)
            self.symbols = []
        return self.over

    def _text_before(self, rest: str) -> str:
        """Return the text of the symbols without its end ``rest``."""
        read = "".join(symbol.text + symbol.literal for symbol in self.symbols)
        return read[: len(read) - len(rest)]

    def _in_section(self) -> bool:
        """Read what precedes a call; return whether another step may be possible."""
        form, text = self._form, self._rest.lstrip()
        if form.section is None:
            text = text.lstrip("; \n\r\t")
        end = form.section[1].text if form.section is not None else ""
        if not text:
            return False
        if end and text.startswith(end):
            self._rest = text[len(end) :]
            self.over = True
        elif end and end.startswith(text):
            return False
        elif form.begin and text.startswith(form.begin.text):
            self._rest = text[len(form.begin.text) :]
            self._step = self._in_body
        elif form.begin and form.begin.text.startswith(text):
            return False
        elif not form.begin and (form.section is not None or text[0] in "[{"):
            self._rest, self._step = text, self._in_body
        elif self.opening:
            raise Malformed("no call follows the opening marker")
        else:
            self.over = True
        return True

    def _in_body(self) -> bool:
        if not self._rest:
            return False
        self._collect(self._scanner.push(self._rest))
        return True

    def _collect(self, rest: str) -> None:
        """Record the calls that the scanner has completed; ``rest``: what it did not read."""
        self._rest = rest
        found = [call for call in self._scanner.calls if call.complete]
        if found:
            self.found += found
            del self._scanner.calls[: len(found)]
            self._consumed += self.opening + self._text_before(rest)
            self.opening, self.symbols = "", [Symbol(rest)] if rest else []
        if self._scanner.done:
            self._step = self._at_end

    def _at_end(self) -> bool:
        """Read the closing marker; without it, the call is over, too."""
        end, text = self._form.end.text, self._rest.lstrip()
        if end and text.startswith(end):
            self._rest = text[len(end) :]
        elif end and end.startswith(text):
            return False
        self._consumed += self._text_before(self._rest)
        self.symbols = [Symbol(self._rest)] if self._rest else []
        self._scanner = self._new_scanner()
        if self._form.section is None and self._form.opening:
            self.over = True
        else:
            self._step = self._in_section
        return True
