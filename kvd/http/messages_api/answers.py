"""Anthropic's message as a stream of events, and in one piece. Sans-io."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.http.messages_api.blocks import Change, ContentBlocks
from kvd.http.messages_api.errors import error_of
from kvd.http.request_stats import RequestStats
from kvd.http.whole_answer import MOST_BYTES
from protocol import messages
from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from kvd.http.errors import Refusal
    from kvd.http.messages_api.reading import Wanted
    from protocol.messages import Event
    from protocol.types import Usage

_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Head:
    """The fields of an answer that its events do not have."""

    id: str
    model: str
    request_id: str


class _Answer:
    """Base of both kinds of answers."""

    def __init__(self, head: Head, wanted: Wanted, now: float) -> None:
        self._head = head
        self._wanted = wanted
        self._stats = RequestStats(1, now)
        self._blocks = ContentBlocks(omits_thinking=wanted.omits_thinking)

    @property
    def over(self) -> bool:
        return self._stats.over

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ending(self, done: messages.Done) -> dict[str, Any]:
        """Return why the answer ended."""
        reason = "end_turn"
        if done.reason == "length":
            limit = self._wanted.call.max_tokens
            is_full = limit is None or done.usage.completion_tokens < limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif done.stop_text:
            reason = "stop_sequence"
        elif done.reason == "stop" and self._blocks.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": done.stop_text or None}


class StreamedMessage(_Answer):
    """A message as events: send the bytes that the methods return."""

    def __init__(self, head: Head, wanted: Wanted, now: float) -> None:
        super().__init__(head, wanted, now)
        self._prompt_tokens = 0
        self._begun = False

    def handle(self, _number: int, event: Event, now: float) -> bytes:
        """Take an event of the call."""
        self._stats.handle(0, event, now)
        match event:
            case messages.Accepted(prompt_tokens=tokens):
                self._prompt_tokens = tokens
                return b""
            case messages.PrefillStarted(cached_tokens=cached):
                return self._begin(cached)
            case messages.Tokens():
                return self._begin() + b"".join(map(_encoded, self._blocks.add(event)))
            case messages.Done():
                return self._begin(event.usage.cached_tokens) + self._done(event)
            case _:
                return b""

    def waiting(self) -> bytes:
        """Return an event that clients skip; comments do not reset the timers of some."""
        return _event("ping")

    def failed(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that an error ends."""
        error = error_of(refusal, self._head.request_id)
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error, enc_hook=str)

    def _begin(self, cached: int = 0) -> bytes:
        """Return the first event, once: when the prefill begins, or if that is not known, later."""
        if self._begun:
            return b""
        self._begun = True
        return _event(
            "message_start", message=self._message([], _usage(self._prompt_tokens, cached))
        )

    def _done(self, done: messages.Done) -> bytes:
        data = b"".join(map(_encoded, self._blocks.finish()))
        usage = _final_usage(done.usage)
        data += _event(
            "message_delta", delta=self._ending(done), usage=usage, kvd=self._stats.extension
        )
        return data + _event("message_stop")


@dataclass
class _Block:
    """One content block of an answer in one piece, so far."""

    begin: Change
    texts: list[str] = field(default_factory=list)
    signature: str = ""


class WholeMessage(_Answer):
    """A message in one piece: `handle` events until it is ``over``, then return the `body`."""

    def __init__(self, head: Head, wanted: Wanted, now: float) -> None:
        super().__init__(head, wanted, now)
        self._content: list[_Block] = []
        self._size = 0
        self._end: messages.Done | None = None

    def handle(self, _number: int, event: Event, now: float) -> None:
        """Take an event of the call; raises `InvalidRequest` if the answer is too large."""
        self._stats.handle(0, event, now)
        match event:
            case messages.Tokens():
                for change in self._blocks.add(event):
                    self._apply(change)
            case messages.Done():
                for change in self._blocks.finish():
                    self._apply(change)
                self._end = event
            case _:
                pass

    def body(self) -> bytes:
        assert self._end is not None, "the answer is not over"
        content = [_block(block.begin, "".join(block.texts), block) for block in self._content]
        message = self._message(content, _final_usage(self._end.usage))
        message |= self._ending(self._end) | {"kvd": self._stats.extension}
        return _json.encode(message)

    def _apply(self, change: Change) -> None:
        match change.what:
            case "begin":
                self._content.append(_Block(change))
            case "add":
                self._content[-1].texts.append(change.text)
                self._size += len(change.text.encode())
            case "end":
                self._content[-1].signature = change.text
        if self._size > MOST_BYTES:
            raise InvalidRequest(
                f"the answer in one piece would exceed {MOST_BYTES} bytes; request a stream "
                "(stream: true), or less (max_tokens)",
                field="stream",
            )


def _usage(prompt_tokens: int, cached: int = 0, completion: int = 0) -> dict[str, Any]:
    """Return a usage. Anthropic's ``input_tokens`` are those that were not in the cache."""
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _final_usage(usage: Usage) -> dict[str, Any]:
    details = {"thinking_tokens": usage.reasoning_tokens}
    final = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    return final | {"output_tokens_details": details}


def _block(begin: Change, text: str, block: _Block | None = None) -> dict[str, Any]:
    """Return a content block; without ``block`` as it begins in a stream."""
    match begin.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            signature = "" if block is None else block.signature
            return {"type": "thinking", "thinking": text, "signature": signature}
        case "call":
            return {
                "type": "tool_use",
                "id": begin.call,
                "name": begin.name,
                "input": _input(text),
            }


def _input(arguments: str) -> dict[str, Any] | msgspec.Raw:
    """Return the arguments of a call; those that were cut off as Anthropic's guide advises."""
    if not arguments:
        return {}
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except ValueError:
        return {"INVALID_JSON": arguments}
    return msgspec.Raw(arguments.encode())


def _encoded(change: Change) -> bytes:
    match change.what:
        case "begin":
            block = _block(change, "")
            return _event("content_block_start", index=change.index, content_block=block)
        case "add":
            return _delta(change.index, _delta_of(change))
        case "end":
            data = b""
            if change.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": change.text}
                data = _delta(change.index, signature)
            return data + _event("content_block_stop", index=change.index)


def _delta_of(change: Change) -> dict[str, str]:
    match change.kind:
        case "text":
            return {"type": "text_delta", "text": change.text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": change.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": change.text}


def _delta(index: int, delta: dict[str, str]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json.encode({"type": name} | fields))
