"""The sans-io part of both clients: encodes requests, and collects each request's events."""

from __future__ import annotations

import itertools
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from kvd.host.home import check_socket_path, locate
from protocol import messages as m
from protocol.errors import (
    InvalidRequest,
    KvdError,
    LocalProtocolError,
    MalformedFrame,
    NotRunning,
    PermissionDenied,
    from_info,
)
from protocol.parts import PartKind, PartReader, PartStart, Piece
from protocol.session import ClientSession
from protocol.tools import ToolCall
from protocol.types import ModelStatus, ReceivedChoice, TokenLogprob, Usage

QUICK_S = 10.0
"""Seconds for calls such as hello, status and cancel. The daemon answers them at once, so a longer
silence means that its process is stopped."""
RECEIVE_BYTES = 64 * 1024

_OTHER_VERSION = "if the daemon has another version, restart it"


def socket_path(socket: str | os.PathLike[str] | None, home: str | os.PathLike[str] | None) -> Path:
    return check_socket_path(Path(socket) if socket is not None else locate(home).socket)


def unreachable(path: Path, error: OSError) -> KvdError:
    if isinstance(error, PermissionError):
        return PermissionDenied(f"{path} belongs to another user", socket=str(path))
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return NotRunning(
            f"no daemon answers on {path}; start one with `kvd serve`", socket=str(path)
        )
    return NotRunning(f"cannot reach the daemon on {path}: {error}", socket=str(path))


def lost() -> NotRunning:
    return NotRunning("the daemon closed the connection")


def closed() -> NotRunning:
    return NotRunning("this client is closed; create a new one")


def silent(seconds: float) -> NotRunning:
    return NotRunning(f"the daemon does not answer within {seconds:g} s; is its process stopped?")


class Exchange:
    """The requests of one connection, and their unread events."""

    def __init__(self) -> None:
        self._session = ClientSession()
        self._numbers = itertools.count(1)
        self._waiting: dict[str, deque[m.Event]] = {}
        self._fault: KvdError | None = None

    def next_id(self) -> str:
        return str(next(self._numbers))

    def request(self, request: m.Request) -> bytes:
        """Open a request and return the bytes to send."""
        self.check()
        try:
            line = self._session.request(request)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "a text contains bytes that are not UTF-8; send text in UTF-8", field="prompt"
            ) from error
        self._waiting[request.id] = deque()
        return line

    def check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def forget(self, request_id: str) -> None:
        """Discard further events of a request; unknown ids are ignored."""
        self._waiting.pop(request_id, None)

    def receive(self, data: bytes) -> None:
        """Decode received bytes; `take` returns the events."""
        try:
            events = self._session.receive(data)
        except MalformedFrame as error:
            self.fail(MalformedFrame(f"{error.message} ({_OTHER_VERSION})", **error.detail))
            return
        except KvdError as error:
            self.fail(error)
            return
        for event in events:
            if isinstance(event, m.Error) and not event.id:
                self.fail(from_info(event.error))
            elif event.id in self._waiting:
                self._waiting[event.id].append(event)

    def fail(self, error: KvdError) -> None:
        """Fail all requests with this error; only the connection's first error counts."""
        self._fault = self._fault or error

    def take(self, request_id: str) -> m.Event | None:
        """Return the next event of a request, or None if none has arrived yet.

        Raises the request's error, or the connection's error after the events before it.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None:
            raise LocalProtocolError(f"request {request_id!r} is over")
        if not waiting:
            self.check()
            return None
        event = waiting.popleft()
        if m.is_last(event):
            del self._waiting[request_id]
        if isinstance(event, m.Error):
            raise from_info(event.error)
        return event


@dataclass
class ChoiceRecord:
    """Results of one choice, collected from its events."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """All text, including reasoning and the arguments of calls; `pieces` splits it."""
    parts: list[PartStart] = field(default_factory=list)
    """Where reasoning, calls and further text begin."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per token, if requested."""
    reason: m.FinishReason | None = None
    """None while the choice runs."""

    def pieces(self) -> list[Piece]:
        """Return all parts so far, one piece each."""
        return list(PartReader().split(self.text, self.parts))

    def text_of(self, kind: PartKind) -> str:
        """Return the text of all parts of a kind."""
        return "".join(piece.text for piece in self.pieces() if piece.part.kind == kind)

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far; arguments of a call that was cut are no valid JSON."""
        found: list[ToolCall] = []
        for piece in self.pieces():
            if piece.part.kind != "call":
                continue
            if piece.begins:
                found.append(ToolCall(piece.part.name, "", piece.part.call))
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.text)
        return found


class CompletionRecord:
    """Results of one request with ``count`` choices, collected from its events."""

    def __init__(self, count: int = 1) -> None:
        self.choices = [ChoiceRecord() for _ in range(count)]
        self.prompt_logprobs: list[TokenLogprob] = []
        """One per prompt token, if requested."""
        self.seed: int | None = None
        """The sampling seed, once the request is accepted."""
        self.request: str = ""
        """The id for `attach` if the daemon dies; empty if the request is not journaled on disk."""
        self.usage: Usage | None = None
        self.reason: m.FinishReason | None = None
        """Why the request ended; None while it runs."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first choice so far."""
        return self.choices[0].tokens

    @property
    def text_so_far(self) -> str:
        """The text of the first choice so far."""
        return self.choices[0].text

    def attach_request(self, request_id: str) -> m.Attach:
        """Return the request for the events that this record has not received."""
        received = [
            ReceivedChoice(len(choice.tokens), len(choice.text.encode()), len(choice.parts))
            for choice in self.choices
        ]
        return m.Attach(
            id=request_id,
            request=self.request,
            received=received,
            received_prompt_logprobs=len(self.prompt_logprobs),
        )

    def continue_from(self, before: CompletionRecord) -> None:
        """Adopt the events that an earlier connection received for the same completion."""
        self.choices, self.prompt_logprobs = before.choices, before.prompt_logprobs
        self.seed, self.request = before.seed, before.request

    def _apply(self, event: m.Event) -> None:
        match event:
            case m.Accepted(seed=seed, request=request):
                self.seed, self.request = seed, request
            case m.Queued() | m.PrefillStarted() | m.Paused() | m.Resumed():
                pass
            case m.PromptLogprobs(logprobs=logprobs):
                self.prompt_logprobs += logprobs
            case m.Tokens():
                choice = self._choice(event.choice)
                choice.tokens += event.tokens
                choice.text += event.text
                choice.parts += event.parts
                choice.logprobs += event.logprobs or ()
            case m.ChoiceFinished(choice=number, reason=reason):
                self._choice(number).reason = reason
            case m.Done(reason=reason, usage=usage):
                self.reason, self.usage = reason, usage
                for choice in self.choices:
                    choice.reason = choice.reason or reason
            case _:
                raise LocalProtocolError(f"not an event of a completion: {event!r}")

    def _choice(self, number: int) -> ChoiceRecord:
        if number >= len(self.choices):
            raise LocalProtocolError(f"choice {number} of {len(self.choices)}")
        return self.choices[number]


class LoadRecord:
    """The progress of one load."""

    def __init__(self) -> None:
        self.progress: m.Loading | None = None
        self.model: ModelStatus | None = None
        """The loaded model, at the end."""

    def _apply(self, event: m.Event) -> None:
        match event:
            case m.Loading():
                self.progress = event
            case m.Loaded(model=model):
                self.model = model
            case _:
                raise LocalProtocolError(f"not an event of a load: {event!r}")
