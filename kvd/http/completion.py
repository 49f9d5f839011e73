"""One HTTP request for completions: starts its calls, and cancels them when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from kvd.http import errors
from protocol import messages
from protocol.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from kvd.http.backend import Call, Completions
    from kvd.http.send_buffer import SendBuffer
    from protocol.messages import Event, Generate

KEEPALIVE_S = 15.0
"""Seconds until a stream without data gets `Streamed.waiting`: proxies close idle streams."""


class Whole(Protocol):
    """An answer in one piece, from the events of the request's calls."""

    @property
    def over(self) -> bool:
        """Whether all calls have ended."""

    def handle(self, number: int, event: Event, now: float) -> object:
        """Take an event of the call with this number; raises `KvdError` to end the request."""

    def body(self) -> bytes: ...


class Streamed(Protocol):
    """An answer as a stream, from the events of the request's calls.

    Methods return the bytes to send.
    """

    @property
    def over(self) -> bool:
        """Whether all calls have ended."""

    def handle(self, number: int, event: Event, now: float) -> bytes:
        """Take an event of the call with this number."""

    def waiting(self) -> bytes:
        """Return what keeps a stream without data open."""

    def failed(self, refusal: errors.Refusal) -> bytes:
        """Return the end of a stream that an error ends."""


class _Completion:
    """The calls of one request."""

    def __init__(self, backend: Completions, requests: Sequence[Generate]) -> None:
        self._backend = backend
        self._requests = requests
        self._calls: list[Call] = []
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Start all calls; leaving the block cancels those that still run."""
        try:
            for number, request in enumerate(self._requests):
                deliver = partial(self._handle, number)
                self._calls.append(self._backend.generate(request, deliver))
            yield
        finally:
            self._cancel()

    def _cancel(self) -> None:
        for call in self._calls:
            call.cancel()

    def _handle(self, number: int, event: Event) -> None:
        raise NotImplementedError


class WholeCompletion(_Completion):
    """A request with an answer in one piece."""

    def __init__(self, backend: Completions, requests: Sequence[Generate], answer: Whole) -> None:
        super().__init__(backend, requests)
        self._answer = answer
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def body(self) -> bytes:
        """Wait for the answer; raises `Refusal`, or `InvalidRequest` if it is too large."""
        with self._running():
            await self._over
        return self._answer.body()

    def _handle(self, number: int, event: Event) -> None:
        if self._over.done():
            return
        if isinstance(event, messages.Error):
            self._over.set_exception(errors.of(event.error))
            return
        try:
            self._answer.handle(number, event, self._loop.time())
        except KvdError as error:
            self._over.set_exception(error)
            self._cancel()
        else:
            if self._answer.over:
                self._over.set_result(None)


class StreamedCompletion(_Completion):
    """A request with a streamed answer: `chunks` yields the bytes to send.

    Close the generator to stop early. An error before the first chunk is raised as a `Refusal`, so
    that the response gets its status. A later error becomes the last chunk.
    """

    def __init__(
        self,
        backend: Completions,
        requests: Sequence[Generate],
        answer: Streamed,
        buffer: SendBuffer,
    ) -> None:
        super().__init__(backend, requests)
        self._answer = answer
        self._buffer = buffer
        self._refused: errors.Refusal | None = None
        self._begun = False
        """The status line is sent."""

    async def chunks(self) -> AsyncGenerator[bytes]:
        with self._running():
            while True:
                data = await self._buffer.take(KEEPALIVE_S)
                if self._refused is not None:
                    raise self._refused
                if not data and self._buffer.over:
                    return
                self._begun = True
                yield data or self._answer.waiting()

    def _handle(self, number: int, event: Event) -> None:
        if self._buffer.over:
            return
        if isinstance(event, messages.Error):
            self._fail(errors.of(event.error))
            return
        data = self._answer.handle(number, event, self._loop.time())
        if data and not self._buffer.put(data, last=self._answer.over):
            self._cancel()
            structlog.get_logger("kvd.http").warning(
                "slow reader: a client did not read its stream and was disconnected",
                model=self._requests[0].model,
            )

    def _fail(self, refusal: errors.Refusal) -> None:
        if not self._begun and self._buffer.empty:
            self._refused = refusal
            self._buffer.close()
        else:
            self._buffer.put(self._answer.failed(refusal), last=True)
        self._cancel()
