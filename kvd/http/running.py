"""One HTTP request for completions: asks the daemon, and cancels when nobody waits any more."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from kvd.http import errors
from kvd.http.answers import Asked, Head, Streamed, comment
from kvd.http.outbox import Outbox
from kvd.http.whole import Whole
from protocol import messages
from protocol.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from kvd.http.port import Backend, Call
    from protocol.messages import Event

PULSE_S = 15.0
"""A stream that has nothing to say says so this often: proxies end what is silent for a minute."""


class _Running:
    """The calls of one request."""

    def __init__(self, backend: Backend, asked: Asked) -> None:
        self._backend = backend
        self._asked_for = asked.calls
        self._calls: list[Call] = []
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def _asked(self, hear: Callable[[int, Event], None]) -> Iterator[None]:
        """Ask for all of them; whatever ends this block cancels what still runs."""
        try:
            for number, request in enumerate(self._asked_for):
                self._calls.append(self._backend.generate(request, _numbered(hear, number)))
            yield
        finally:
            self._cancel()

    def _cancel(self) -> None:
        for call in self._calls:
            call.cancel()


def _numbered(hear: Callable[[int, Event], None], number: int) -> Callable[[Event], None]:
    return lambda event: hear(number, event)


class Complete(_Running):
    """An answer in one piece."""

    def __init__(self, backend: Backend, head: Head, asked: Asked) -> None:
        super().__init__(backend, asked)
        self._answer = Whole(head, asked, self._loop.time())
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def body(self) -> bytes:
        """Return it when it is there; raises `Refusal` or `InvalidRequest` (too large)."""
        with self._asked(self._hear):
            await self._over
        return self._answer.body()

    def _hear(self, number: int, event: Event) -> None:
        if self._over.done():
            return
        if isinstance(event, messages.Error):
            self._over.set_exception(errors.of(event.error))
            return
        try:
            self._answer.hear(number, event, self._loop.time())
        except KvdError as error:
            self._over.set_exception(error)
            self._cancel()
            return
        if self._answer.over:
            self._over.set_result(None)


class Stream(_Running):
    """An answer as it comes: `chunks` yields what is to be written; close it when you stop early.

    What goes wrong before the first chunk is raised as a `Refusal`, so that it has a status of its
    own; what goes wrong later is a chunk, and the last one.
    """

    def __init__(self, backend: Backend, head: Head, asked: Asked, outbox: Outbox) -> None:
        super().__init__(backend, asked)
        self._answer = Streamed(head, asked, self._loop.time())
        self._outbox = outbox
        self._refused: errors.Refusal | None = None
        self._begun = False
        """The client has its status line."""

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield bytes, none of them empty."""
        with self._asked(self._hear):
            while True:
                data = await self._outbox.take(PULSE_S)
                if self._refused is not None:
                    raise self._refused
                if not data and self._outbox.over:
                    return
                self._begun = True
                yield data or comment("waiting")

    def _hear(self, number: int, event: Event) -> None:
        if self._outbox.over:
            return
        if isinstance(event, messages.Error):
            self._fail(errors.of(event.error))
            return
        data = self._answer.hear(number, event, self._loop.time())
        if isinstance(event, messages.Accepted):
            data = data or comment("accepted")
        if data and not self._outbox.put(data, last=self._answer.tally.over):
            self._cut()

    def _fail(self, refusal: errors.Refusal) -> None:
        if not self._begun and self._outbox.empty:
            self._refused = refusal
            self._outbox.close()
        else:
            self._outbox.put(b"data: " + refusal.encoded() + b"\n\n", last=True)
        self._cancel()

    def _cut(self) -> None:
        self._cancel()
        structlog.get_logger("kvd.http").warning(
            "slow reader: a client did not read its stream, which was ended",
            model=self._answer.head.model,
        )
