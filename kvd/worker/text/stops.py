"""Ending a text before the first of its stop strings, while it streams.

Text that may still become a stop string is held back. Which stop string ends the text does not
depend on how the text is cut into pieces: it is the one that is complete first, and of those
complete at the same character the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_STOP_CHARS = 4096
"""Of one stop string; longer ones are mistakes, and their tables would stall the other rows."""


class _Matcher:
    """Knuth, Morris and Pratt: how much of one stop string the text ends with."""

    __slots__ = ("_borders", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.matched = 0

    def push(self, char: str) -> bool:
        """Take a character; return whether the stop string is complete."""
        at = self.matched
        while at and self._stop[at] != char:
            at = self._borders[at - 1]
        if self._stop[at] == char:
            at += 1
        self.matched = at
        return at == len(self._stop)


def _borders(stop: str) -> list[int]:
    """Return, for each beginning of ``stop``, the length of its longest proper border."""
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
    """The text of one completion on its way out: `push` pieces, then `finish`."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string was hit; nothing comes out any more then."""
        self._matchers = [_Matcher(stop) for stop in _checked(tuple(stops))]
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece and return what may be sent now."""
        if not self._matchers or not text:
            return "" if self.stopped else text
        if self.stopped:
            return ""
        for at, char in enumerate(text):
            complete = [m.matched for m in self._matchers if m.push(char)]
            if complete:
                self.stopped = True
                pending = self._held + text[: at + 1]
                self._held = ""
                return pending[: len(pending) - max(complete)]
        pending = self._held + text
        cut = len(pending) - max(m.matched for m in self._matchers)
        self._held = pending[cut:]
        return pending[:cut]

    def finish(self) -> str:
        """Return what was held back: the text ends here, so it is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _checked(stops: Sequence[str]) -> Sequence[str]:
    for stop in stops:
        if not stop:
            raise InvalidRequest("a stop string must not be empty", field="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string has at most {MAX_STOP_CHARS} characters, not {len(stop)}",
                field="stop",
            )
    return stops
