"""Clients of a simulated daemon, over its socket and over HTTP. They check all answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from protocol import messages
from protocol.messages import Event, Request, is_last
from protocol.parts import PartStart
from protocol.session import ClientSession
from tests.sim.asked import TOOL, Asked
from tests.sim.network import Link
from tests.sim.sim_daemon import UNREAD_BYTES

Connect = Callable[[Callable[[bytes], None], Callable[[], None]], Link]
"""Connects a client to the daemon, given what takes its bytes and what takes the end."""


class SocketClient:
    """A client of the protocol, with any number of requests."""

    def __init__(self, connect: Connect) -> None:
        self.session = ClientSession()
        self.asked: dict[str, Asked] = {}
        """Open generations by id."""
        self.open: dict[str, Request] = {}
        """Other open requests, except those that follow the events."""
        self.followed: dict[str, int] = {}
        """By id of an ``events`` request with ``follow``, the number of its newest record."""
        self.replies: list[Event] = []
        self.fault = ""
        """Code of the error that ended the connection."""
        self._keys = count(1)
        self.link = connect(self._receive, self._ended)

    @property
    def waits(self) -> bool:
        return bool(self.asked or self.open or self.followed)

    def ask(self, asked: Asked) -> None:
        key = f"q{next(self._keys)}"
        self.asked[key] = asked
        self.link.send(self.session.request(asked.generate(key)))

    def attach(self, asked: Asked) -> None:
        key = f"q{next(self._keys)}"
        self.asked[key] = asked
        asked.begin_again()
        attach = messages.Attach(id=key, request=asked.name, received=asked.received)
        self.link.send(self.session.request(attach))

    def cancel(self, key: str) -> None:
        asked = self.asked[key]
        if not asked.cancelled:
            asked.cancelled, asked.cancelled_at = True, asyncio.get_running_loop().time()
        self.send(messages.Cancel, target=key)

    def follow(self) -> None:
        """Request all events, now and from now on."""
        key = f"q{next(self._keys)}"
        self.followed[key] = 0
        self.link.send(self.session.request(messages.Events(id=key, follow=True)))

    def unfollow(self) -> None:
        for key in self.followed:
            self.send(messages.Cancel, target=key)

    def send(self, kind: type[Request], **fields: Any) -> None:
        key = f"q{next(self._keys)}"
        request = self.open[key] = kind(id=key, **fields)
        self.link.send(self.session.request(request))

    def reset(self, reason: str) -> None:
        """Cut the connection, which the daemon may have ended because the client did not read."""
        if self.link.transport.ending and self.link.max_unread > UNREAD_BYTES:
            for asked in self.asked.values():
                asked.disconnected = True
        self.link.reset()
        self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        for asked in self.asked.values():
            asked.abandoned = reason
        self.asked.clear()
        self.open.clear()
        self.followed.clear()

    def _receive(self, data: bytes) -> None:
        for event in self.session.receive(data):
            if not event.id:
                assert isinstance(event, messages.Error)
                self.fault = event.error.code
            elif (asked := self.asked.get(event.id)) is not None:
                asked.handle(event)
                if is_last(event):
                    del self.asked[event.id]
                    if asked.cancelled and self.link.always_read:
                        took_s = asyncio.get_running_loop().time() - asked.cancelled_at
                        asked.cancel_took_s = took_s
            elif event.id in self.followed:
                self._check_followed(event)
            else:
                self.replies.append(event)
                if is_last(event):
                    del self.open[event.id]

    def _check_followed(self, event: Event) -> None:
        """No record is missing or repeated."""
        newest = self.followed[event.id]
        match event:
            case messages.EventRecord(seq=number):
                assert number == newest + 1, f"record {number} follows {newest}"
                self.followed[event.id] = number
            case messages.EventsReply(last=last):
                assert last == newest, f"the last of {last} records has number {newest}"
                del self.followed[event.id]
            case _:
                raise AssertionError(event)

    def _ended(self) -> None:
        """The daemon ended the connection."""
        if self.fault == "slow_reader":
            unread = self.link.max_unread
            assert unread > UNREAD_BYTES, f"a slow reader that left {unread} bytes unread"
        self._abandon(self.fault or ("closed" if self.link.ended_well else "aborted"))


class HttpClient:
    """One HTTP request on a connection of its own."""

    def __init__(self, connect: Connect, asked: Asked, *, chat: bool, stream: bool) -> None:
        self.asked = asked
        self.stream, self._chat = stream, chat
        self.waits = True
        self._data = bytearray()
        self.link = connect(self._data.extend, self._ended)
        self.link.send(self._request())

    def _request(self) -> bytes:
        asked = self.asked
        body: dict[str, Any] = {
            "model": asked.model,
            "seed": asked.seed,
            "max_tokens": asked.max_tokens,
            "n": asked.n,
            "stream": self.stream,
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": asked.prompt[6:-1]}]
            if asked.tools:
                function = {"name": TOOL.name, "parameters": TOOL.parameters}
                body["tools"] = [{"type": "function", "function": function}]
        else:
            body["prompt"] = asked.prompt
        if asked.stop:
            body["stop"] = asked.stop
        if asked.deadline_s is not None:
            body["deadline_s"] = asked.deadline_s
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        path = b"/v1/chat/completions" if self._chat else b"/v1/completions"
        content = msgspec.json.encode(body)
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n"
        return head % (path, len(content)) + b"\r\n" + content

    def reset(self, reason: str) -> None:
        """Cut the connection."""
        self.link.reset()
        self._ended()
        if not self.asked.ended:
            self.asked.abandoned = reason

    def _ended(self) -> None:
        """Check the answer, whole or cut."""
        self.waits = False
        self.asked.abandoned = "closed" if self.link.ended_well else "aborted"
        head, found, rest = bytes(self._data).partition(b"\r\n\r\n")
        if not found:
            return
        status = int(head.split(b" ", 2)[1])
        content = _dechunked(rest) if b"chunked" in head.lower() else rest
        if status != 200:
            if self.link.ended_well:
                self._fail(content)
        elif self.stream:
            self._check_stream(content)
        elif self.link.ended_well:
            self._check_body(msgspec.json.decode(content))

    def _fail(self, content: bytes) -> None:
        error = msgspec.json.decode(content)["error"]
        self.asked.ended = error.get("kvd", error)["code"]

    def _check_stream(self, content: bytes) -> None:
        asked = self.asked
        for line in content.split(b"\n\n")[:-1]:
            if not line.startswith(b"data: "):
                assert line.startswith(b": "), line
                continue
            assert not asked.ended, f"{asked}: {line!r} after its end"
            if line == b"data: [DONE]":
                asked.ended = "length"
                assert all(it.reason for it in asked.choices), f"{asked}: done before its choices"
                continue
            chunk = msgspec.json.decode(line[6:])
            if "error" in chunk:
                asked.ended = chunk["error"]["kvd"]["code"]
                continue
            for choice in chunk["choices"]:
                self._check_choice(choice, "delta")
            if chunk.get("usage"):
                self._check_usage(chunk["usage"])

    def _check_body(self, body: dict[str, Any]) -> None:
        asked = self.asked
        for choice in body["choices"]:
            self._check_choice(choice, "message")
        assert all(it.reason for it in asked.choices), f"{asked}: lacks choices"
        self._check_usage(body["usage"])
        asked.ended = "length"

    def _check_choice(self, choice: dict[str, Any], key: str) -> None:
        asked, number = self.asked, choice["index"]
        received = asked.choices[number]
        assert not received.reason, f"{asked}: more of choice {number} after its end"
        if self._chat:
            self._add(number, choice[key])
        else:
            asked.add_text(number, choice["text"])
        if (reason := choice["finish_reason"]) is not None:
            received.reason = reason
            self._check_end(number, reason)
            received.tokens = list(asked.expected[number].tokens)

    def _add(self, number: int, message: dict[str, Any]) -> None:
        """Add what a message or a delta has; its order is that of the parts."""
        asked, received = self.asked, self.asked.choices[number]
        asked.add_text(number, message.get("reasoning_content") or "")
        asked.add_text(number, message.get("content") or "")
        for call in message.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                received.parts.append(PartStart(len(received.text.encode()), "call", name))
            asked.add_text(number, call["function"]["arguments"])

    def _check_end(self, number: int, reason: str) -> None:
        asked, expected = self.asked, self.asked.expected[number]
        calls = [part for part in expected.parts if part.kind == "call"]
        if calls and expected.reason == "stop":
            assert reason == "tool_calls", f"{asked}: ended with {reason}"
            reason = "stop"
        asked.check_whole(number, reason, tokens=False)
        assert asked.choices[number].parts == (calls if self._chat else []), f"{asked}: calls"

    def _check_usage(self, usage: dict[str, int]) -> None:
        self.asked.check_usage(usage["prompt_tokens"], usage["completion_tokens"])


def _dechunked(data: bytes) -> bytes:
    """Return the content of a chunked body; an incomplete last chunk counts as far as it goes."""
    content = b""
    while data:
        size, found, data = data.partition(b"\r\n")
        if not found:
            break
        length = int(size, 16)
        content += data[:length]
        data = data[length + 2 :]
    return content
