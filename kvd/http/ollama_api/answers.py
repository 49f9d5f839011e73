"""Ollama's answers, streamed as lines of JSON and in one piece, from the daemon's events. Sans-io.

A tool call is sent whole, with its arguments as an object. Arguments that a limit has cut off are
no object, so they are sent as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.http.ollama_api import errors
from protocol import messages
from protocol.errors import InvalidRequest
from protocol.fields import NO_LOGPROB
from protocol.parts import PartReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.http.errors import Refusal
    from protocol.messages import Done, Event, FinishReason, Tokens
    from protocol.parts import PartStart
    from protocol.types import Alternative, TokenLogprob

MOST_BYTES = 32 * 1024 * 1024
"""Limit for an answer in one piece."""
_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Piece:
    """What a line adds to the answer."""

    content: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Head:
    """What all lines of an answer have in common."""

    model: str
    is_chat: bool

    def line(self, piece: Piece, **more: Any) -> dict[str, Any]:
        """Return a line; ``more``: the fields of the last one."""
        line: dict[str, Any] = {"model": self.model, "created_at": now_text()}
        thinking = {"thinking": piece.thinking} if piece.thinking else {}
        if self.is_chat:
            calls = {"tool_calls": piece.calls} if piece.calls else {}
            message = {"role": "assistant", "content": piece.content, **thinking, **calls}
            line["message"] = message
        else:
            line |= {"response": piece.content, **thinking}
        if piece.logprobs:
            line["logprobs"] = piece.logprobs
        return line | {"done": False} | more


def now_text() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass
class Parts:
    """Turns tokens events into pieces; keeps the call that has begun."""

    _reader: PartReader = field(default_factory=PartReader)
    _call: PartStart | None = None
    _arguments: list[str] = field(default_factory=list)

    def split(self, event: Tokens) -> Iterator[Piece]:
        for piece in self._reader.split(event.text, event.parts):
            if piece.begins:
                yield from self.end()
            if piece.part.kind == "call":
                self._call = piece.part
                self._arguments.append(piece.text)
            elif piece.text:
                thinks = piece.part.kind == "reasoning"
                yield Piece(thinking=piece.text) if thinks else Piece(piece.text)
        if event.logprobs:
            yield Piece(logprobs=tuple(map(_logprob, event.logprobs)))

    def end(self) -> Iterator[Piece]:
        """Yield the call that has ended, if there is one."""
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return
        try:
            msgspec.json.decode(text, type=dict[str, Any])
        except ValueError:
            yield Piece(text)
        else:
            function = {"name": call.name, "arguments": msgspec.Raw(text.encode())}
            yield Piece(calls=({"id": call.call, "function": function},))


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return _alternative(token) | {"top_logprobs": [_alternative(one) for one in token.top]}


def _alternative(token: Alternative) -> dict[str, Any]:
    logprob = NO_LOGPROB if token.logprob is None else token.logprob
    content = list(token.text.encode()) if token.bytes is None else token.bytes
    return {"token": token.text, "logprob": logprob, "bytes": content}


class _Answer:
    """The base of both kinds of answers. Times are in seconds."""

    def __init__(self, head: Head, now: float) -> None:
        self._head = head
        self._parts = Parts()
        self._began, self._accepted, self._first = now, now, now
        self._has_tokens = False
        self._done: Done | None = None
        self._ended = now

    @property
    def over(self) -> bool:
        return self._done is not None

    def _pieces(self, event: Event, now: float) -> Iterator[Piece]:
        """Note an event, and yield what it adds."""
        match event:
            case messages.Accepted():
                self._accepted = now
            case messages.Tokens():
                if not self._has_tokens:
                    self._has_tokens, self._first = True, now
                yield from self._parts.split(event)
            case messages.Done():
                self._done, self._ended = event, now
                yield from self._parts.end()
            case _:
                pass

    @property
    def _end(self) -> dict[str, Any]:
        """The fields of the last line."""
        assert self._done is not None, "the answer has not ended"
        usage = self._done.usage
        first = self._first if self._has_tokens else self._ended
        return {
            "done": True,
            "done_reason": done_reason(self._done.reason),
            "total_duration": nanoseconds(self._ended - self._began),
            "load_duration": nanoseconds(self._accepted - self._began),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - self._accepted),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(self._ended - first),
        }


def done_reason(reason: FinishReason) -> str:
    return "length" if reason == "length" else "stop"


def nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


class StreamedAnswer(_Answer):
    """An answer as lines of JSON. ``kvd.http.completion.Streamed``."""

    def handle(self, _number: int, event: Event, now: float) -> bytes:
        lines = [self._head.line(piece) for piece in self._pieces(event, now)]
        if self.over:
            lines.append(self._head.line(Piece(), **self._end))
        return b"".join(map(_line, lines))

    def waiting(self) -> bytes:
        """Return a line without content: empty lines would break clients."""
        return _line(self._head.line(Piece()))

    def failed(self, refusal: Refusal) -> bytes:
        return errors.body(refusal) + b"\n"


def _line(line: dict[str, Any]) -> bytes:
    return _json.encode(line) + b"\n"


class WholeAnswer(_Answer):
    """An answer in one piece. ``kvd.http.completion.Whole``."""

    def __init__(self, head: Head, now: float) -> None:
        super().__init__(head, now)
        self._found: list[Piece] = []
        self._size = 0

    def handle(self, _number: int, event: Event, now: float) -> None:
        """Take an event; raises `InvalidRequest` above `MOST_BYTES`."""
        for piece in self._pieces(event, now):
            self._found.append(piece)
            self._size += len(_json.encode(piece))
        if self._size > MOST_BYTES:
            raise InvalidRequest(
                f"the answer takes more than {MOST_BYTES} bytes; use stream: true, or ask for fewer"
                " tokens or logprobs",
                field="stream",
            )

    def body(self) -> bytes:
        whole = Piece(
            "".join(piece.content for piece in self._found),
            "".join(piece.thinking for piece in self._found),
            tuple(call for piece in self._found for call in piece.calls),
            tuple(logprob for piece in self._found for logprob in piece.logprobs),
        )
        return _json.encode(self._head.line(whole, **self._end))
