"""A response with ``background: true``: it runs without its client, and clients may follow it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kvd.http import errors
from kvd.http.completion import KEEPALIVE_S
from protocol import messages
from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kvd.http.backend import Completions
    from kvd.http.responses_api.answer import ResponseAnswer
    from protocol.messages import Event, Generate

_END = b"\n\n"
_MOST_AT_ONCE = 256
"""Events that a follower gets in one piece, so that a long answer needs no second copy."""


class ShowQuery(msgspec.Struct, frozen=True):
    """The query of a stored response."""

    stream: bool = False
    starting_after: int = -1
    """Number of the event after which the stream begins."""


class Run:
    """The events of a background response: all that fit, whether or not a client follows.

    ``changed`` is called after each event.
    """

    def __init__(self, answer: ResponseAnswer, changed: Callable[[], None]) -> None:
        self._answer: ResponseAnswer | None = answer
        """None after the end, when `body` and the events have all of it."""
        self._status = answer.status
        self._changed = changed
        self._cancel: Callable[[], None] = _nothing
        self._events: list[bytes] = []
        self._first = 0
        """Number of the first event that is kept."""
        self._news = asyncio.Event()
        self.nbytes = 0
        """Bytes of the kept events."""
        self.body = answer.body()
        """The response as it is now, as JSON."""
        self._add(answer.begin())

    @property
    def over(self) -> bool:
        return self._answer is None

    def start(self, backend: Completions, call: Generate) -> None:
        self._cancel = backend.generate(call, self._handle).cancel

    def cancel(self) -> None:
        """End the response as cancelled; without effect after its end."""
        if self._answer is not None:
            self._cancel()
            self._add(self._answer.cancelled())
            self._end(self._answer)

    def drop_events(self, nbytes: int) -> None:
        """Drop the oldest events, at least so many bytes of them if there are."""
        count = dropped = 0
        while count < len(self._events) and dropped < nbytes:
            dropped += len(self._events[count])
            count += 1
        del self._events[:count]
        self._first += count
        self.nbytes -= dropped

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events after the one with this number, until the last one.

        Raises `InvalidRequest` before the first event if some of them are no longer kept. Later it
        ends instead: the client reads slowly, and continues with another request.
        """
        self.check_kept(after)
        number = after + 1
        while self._first <= number:
            news = self._news
            start = number - self._first
            if events := self._events[start : start + _MOST_AT_ONCE]:
                number += len(events)
                yield b"".join(events)
            elif (answer := self._answer) is None:
                return
            else:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await news.wait()
                except TimeoutError:
                    yield answer.repeated(number - 1)

    def check_kept(self, after: int) -> None:
        """Raise `InvalidRequest` if some of the events after this one are no longer kept."""
        if after + 1 < self._first:
            raise InvalidRequest(
                f"starting_after is {after}, but the events before {self._first} are not kept any "
                "more; poll the response until it is over",
                field="starting_after",
            )

    def _handle(self, event: Event) -> None:
        answer = self._answer
        if answer is None:
            return
        if isinstance(event, messages.Error):
            self._add(answer.failed(errors.of(event.error)))
            self._end(answer)
            return
        self._add(answer.handle(0, event, asyncio.get_running_loop().time()))
        if answer.over:
            self._end(answer)
            return
        if answer.status != self._status:
            self._status, self.body = answer.status, answer.body()
        self._changed()

    def _end(self, answer: ResponseAnswer) -> None:
        self.body = answer.body()
        self._answer, self._cancel = None, _nothing
        self._changed()

    def _add(self, data: bytes) -> None:
        new = [event + _END for event in data.split(_END)[:-1]]
        self._events += new
        self.nbytes += len(data)
        self._news.set()
        self._news = asyncio.Event()


def _nothing() -> None:
    pass
