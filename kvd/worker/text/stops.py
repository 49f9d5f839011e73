"""Stop strings in streamed text: the text ends before the first one.

Text that may still become a stop string is held back. The stop string that is complete first ends
the text; if several are complete at the same character, the longest one counts. How the text is
split into pieces makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.errors import InvalidRequest

MAX_STOP_CHARS = 4096
"""Longest stop string. Longer ones are mistakes, and their tables would delay the other rows."""


class _Matcher:
    """Length of the longest prefix of one stop string that the text ends with (KMP algorithm)."""

    __slots__ = ("_borders", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise InvalidRequest("a stop string must not be empty", field="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string has at most {MAX_STOP_CHARS} characters, not {len(stop)}",
                field="stop",
            )
        self._stop = stop
        self._borders = _borders(stop)
        self.matched = 0

    def push(self, char: str) -> bool:
        """Append a character; return whether the stop string is complete."""
        at = self.matched
        while at and self._stop[at] != char:
            at = self._borders[at - 1]
        if self._stop[at] == char:
            at += 1
        self.matched = at
        return at == len(self._stop)


def _borders(stop: str) -> list[int]:
    """Return the length of the longest proper border of each prefix of ``stop``."""
    borders = [0] * len(stop)
    at = 0
    for end in range(1, len(stop)):
        while at and stop[end] != stop[at]:
            at = borders[at - 1]
        if stop[end] == stop[at]:
            at += 1
        borders[end] = at
    return borders


class StopFilter:
    """Filters the text of one completion: call `push` for each piece, then `finish`."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.found = ""
        """The stop string that was found. Then no more text is returned."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""

    @property
    def stopped(self) -> bool:
        return bool(self.found)

    def push(self, text: str) -> str:
        """Append a piece and return the text that may be sent now."""
        if self.stopped or not text:
            return ""
        if not self._matchers:
            return text
        for at, char in enumerate(text):
            complete = [m.matched for m in self._matchers if m.push(char)]
            if complete:
                pending = self._held + text[: at + 1]
                self._held = ""
                cut = len(pending) - max(complete)
                self.found = pending[cut:]
                return pending[:cut]
        pending = self._held + text
        cut = len(pending) - max(m.matched for m in self._matchers)
        self._held = pending[cut:]
        return pending[:cut]

    def finish(self) -> str:
        """Return the text that was held back: at the end of the text it is no stop string."""
        held, self._held = self._held, ""
        return held
