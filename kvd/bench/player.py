"""Plays a trace on a server: sends each request at its time, and records when tokens arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvd.bench.measure import Stream
from kvd.bench.traces import Ask, Trace


class Driver(Protocol):
    """Client of one server."""

    path: str
    """How the server computes attention, if it reports that; else empty."""

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        """Send one greedy request, record its tokens in ``stream``, and return when it ends."""

    async def close(self) -> None:
        """Close the connections."""


async def play(
    trace: Trace,
    prompts: Sequence[str],
    driver: Driver,
    mark: Callable[[int], None] = lambda _: None,
    *,
    limit_s: float | None = None,
) -> list[Stream]:
    """Send all requests of the trace; return their streams in the trace's order.

    After ``limit_s`` seconds, requests that still run are cancelled. Their streams are not
    `Stream.finished`.

    ``mark`` is called with the number of tokens so far: when every stream has a token, and again
    when the first stream ends. It is never called if a stream ends before the last one begins.
    """
    player = _Player(trace, driver, mark)
    asks = zip(trace.asks, prompts, player.streams, strict=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for ask, prompt, stream in asks:
                group.create_task(player.send(ask, prompt, stream))
    return player.streams


class _Player:
    def __init__(self, trace: Trace, driver: Driver, mark: Callable[[int], None]) -> None:
        self._driver = driver
        self._mark = mark
        self._begun = self._over = False
        self._start = time.monotonic()
        self._limit: contextlib.AbstractAsyncContextManager[None] = (
            contextlib.nullcontext()
            if trace.concurrency is None
            else asyncio.Semaphore(trace.concurrency)
        )
        self._reached = {ask.behind: asyncio.Event() for ask in trace.asks if ask.behind}
        self.streams = [Stream(heard=self._heard) for _ in trace.asks]
        pairs = zip(trace.asks, self.streams, strict=True)
        self._early = [stream for ask, stream in pairs if not ask.behind]

    async def send(self, ask: Ask, prompt: str, stream: Stream) -> None:
        await asyncio.sleep(max(0.0, self._start + ask.at_s - time.monotonic()))
        async with self._limit:
            if ask.behind:
                await self._reached[ask.behind].wait()
            stream.sent = time.monotonic()
            await self._driver.ask(prompt, ask.output, stream)
            stream.finished = True
        if self._begun and not self._over:
            self._mark(self._shown)
        self._over = True

    @property
    def _shown(self) -> int:
        return sum(stream.shown for stream in self.streams)

    def _heard(self) -> None:
        if not self._begun and not self._over and all(s.arrivals for s in self.streams):
            self._begun = True
            self._mark(self._shown)
        for behind, event in self._reached.items():
            if not event.is_set() and all(early.shown >= behind for early in self._early):
                event.set()
