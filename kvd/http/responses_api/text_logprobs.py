"""Finds the tokens of a message among the logprobs of all tokens of an answer. Sans-io.

The logprobs of an answer include those of reasoning, of calls and of the markers around them, which
are in no text. Tokens and text are matched by their bytes, in order.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from kvd.http.formats import ChatFormat, bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.types import TokenLogprob

MOST_MARKERS = 32
"""Maximum tokens without text before a token of the text: bounds the search after a character that
no token has, such as U+FFFD."""
_json = msgspec.json.Encoder()


class TextLogprobs:
    """Tokens that wait for their text: `add` those of an event, then `take` its pieces in order."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[TokenLogprob, bytes]] = deque()
        self._rest = b""
        """End of a token of which the text's previous piece contained the beginning."""

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        self._tokens += ((token, bytes_of([token])) for token in logprobs)

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the tokens that begin in the next piece of the text, without those before it."""
        content, at = text.encode(), 0
        if self._rest:
            at = _common(content, 0, self._rest)
            self._rest = self._rest[at:] if at == len(content) else b""
        found: list[TokenLogprob] = []
        while at < len(content) and self._tokens:
            skipped = next(
                (
                    number
                    for number, (_, token) in enumerate(islice(self._tokens, MOST_MARKERS))
                    if _common(content, at, token)
                ),
                None,
            )
            if skipped is None:
                at += 1
                continue
            for _ in range(skipped):
                self._tokens.popleft()
            token, its_bytes = self._tokens.popleft()
            common = _common(content, at, its_bytes)
            at, self._rest = at + common, its_bytes[common:]
            found.append(token)
        return found

    def skip(self) -> None:
        """Drop all tokens that wait: their text, such as arguments, may differ from theirs."""
        self._tokens.clear()
        self._rest = b""


def encoded(tokens: Sequence[TokenLogprob]) -> bytes:
    """Return the items of OpenAI's list of logprobs as JSON, without the brackets."""
    return _json.encode(ChatFormat().logprobs(list(tokens), 0).content)[1:-1]


def _common(content: bytes, at: int, token: bytes) -> int:
    """Return the bytes of the token at this place: all of them, or all up to the content's end."""
    length = min(len(token), len(content) - at)
    return length if length and content.startswith(token[:length], at) else 0
