"""`AsyncClient`: many requests at once over one connection, on an asyncio loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self, Unpack

from kvd.client.exchange import (
    QUICK_S,
    CompletionRecord,
    Exchange,
    LoadRecord,
    attach_request,
    closed,
    expect,
    lost,
    silent,
    socket_path,
    unreachable,
)
from kvd.client.options import Messages, Options, generate_request, turns
from protocol import messages as m
from protocol.forecast import Forecast
from protocol.policy import ModelPolicy
from protocol.types import DaemonStatus, KVSpec, ModelStatus

_CHUNK = 64 * 1024


class AsyncClient:
    """A connection to the daemon: ``async with AsyncClient() as kvd: ...``."""

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        self._path: Path = socket_path(socket, home)
        self._exchange = Exchange()
        self._news: dict[str, asyncio.Event] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Open the connection."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        except OSError as error:
            raise unreachable(self._path, error) from error
        self._reading = asyncio.create_task(self._read(reader), name="kvd client")

    async def close(self) -> None:
        """Close the connection; the daemon cancels the completions that it still had."""
        if self._writer is None or self._reading is None:
            return
        self._exchange.fail(closed())
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def hello(self) -> m.HelloReply:
        """Ask who is there."""
        return expect(await self._quick(m.Hello(id=self._exchange.next_id())), m.HelloReply)

    async def status(self) -> DaemonStatus:
        """Ask for everything that `kvctl status` shows."""
        reply = await self._quick(m.Status(id=self._exchange.next_id()))
        return expect(reply, m.StatusReply).status

    async def metrics(self) -> str:
        """Ask for what Prometheus reads, in its text format."""
        reply = await self._quick(m.Metrics(id=self._exchange.next_id()))
        return expect(reply, m.MetricsReply).text

    async def load(
        self,
        model: str,
        *,
        alias: str | None = None,
        kv: KVSpec | None = None,
        policy: ModelPolicy | None = None,
    ) -> AsyncLoad:
        """Load a model; iterate over the progress, or await `.result()`."""
        number = self._exchange.next_id()
        spec = kv or KVSpec()
        await self._send(m.Load(id=number, model=model, alias=alias, kv=spec, policy=policy))
        return AsyncLoad(self, number)

    async def unload(self, model: str, *, force: bool = False) -> m.Unloaded:
        """Unload a model, after its requests unless forced; returns when its memory is free."""
        request = m.Unload(id=self._exchange.next_id(), model=model, force=force)
        return expect(await self._call(request), m.Unloaded)

    async def pin(self, model: str, *, pinned: bool = True) -> m.Pinned:
        """Never have a model unloaded to make room; or let that be so again."""
        number = self._exchange.next_id()
        request = m.Pin(id=number, model=model) if pinned else m.Unpin(id=number, model=model)
        return expect(await self._quick(request), m.Pinned)

    async def configure(
        self,
        *,
        budget_bytes: int | None = None,
        settings: Mapping[str, Any] | None = None,
        table: bool = False,
    ) -> m.Configured:
        """Change settings by key until the daemon ends; return what holds now, with ``table`` all.

        None as a value: what the file says.
        """
        request = m.Configure(
            id=self._exchange.next_id(),
            budget_bytes=budget_bytes,
            settings=dict(settings or {}),
            table=table,
        )
        return expect(await self._quick(request), m.Configured)

    async def events(
        self, model: str | None = None, *, since: int = 0, follow: bool = False
    ) -> AsyncIterator[m.Happened]:
        """Tell what was done to models and why, from number ``since`` on; `follow`: and will be."""
        number = self._exchange.next_id()
        await self._send(m.Events(id=number, model=model, since=since, follow=follow))
        event: m.Event | None = None
        try:
            while isinstance(event := await self._next(number), m.Happened):
                yield event
        finally:
            if isinstance(event, m.Happened):  # whoever reads has enough
                self._news.pop(number, None)
                self._exchange.forget(number)
                await self.cancel(number)

    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: list[int] | None = None,
        **options: Unpack[Options],
    ) -> AsyncCompletion:
        """Complete a prompt; iterate over the events, or await `.text()`.

        All that a request may say is in `kvd.client.options.Options`.
        """
        number = self._exchange.next_id()
        request = generate_request(number, model, prompt, messages, tokens, options)
        await self._send(request)
        return AsyncCompletion(self, number, request.n)

    async def attach(self, request: str | CompletionRecord, *, choices: int = 1) -> AsyncCompletion:
        """Get the rest of a completion whose daemon died; its journal must be on disk.

        By the completion itself, which what comes is added to, or by its `request`: then all of it
        comes, of so many ``choices``.
        """
        number = self._exchange.next_id()
        await self._send(attach_request(number, request))
        count = choices if isinstance(request, str) else len(request.choices)
        completion = AsyncCompletion(self, number, count)
        if not isinstance(request, str):
            completion.take_over(request)
        return completion

    async def cancel(self, target: str) -> bool:
        """End another request of this connection; return whether it still ran."""
        reply = await self._quick(m.Cancel(id=self._exchange.next_id(), target=target))
        return expect(reply, m.Cancelled).found

    async def explain(
        self, model: str, *, rows: int = 1, context: int | None = None, kv: KVSpec | None = None
    ) -> Forecast:
        """Ask what so many rows of a model would take, and what would make room for them."""
        number = self._exchange.next_id()
        request = m.Explain(id=number, model=model, rows=rows, context=context, kv=kv)
        return expect(await self._call(request), m.Explained).forecast

    async def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        most: int = m.MAX_LISTED_TOKENS,
        texts: bool = False,
    ) -> m.Tokenized:
        """Tell the tokens that a model reads for a text, or so many of them; 0: only the count.

        With ``messages`` as its chat template has it. Nothing runs for it.
        """
        request = m.Tokenize(
            id=self._exchange.next_id(),
            model=model,
            prompt=prompt,
            messages=turns(messages),
            most=most,
            texts=texts,
        )
        return expect(await self._call(request), m.Tokenized)

    async def drain(self) -> None:
        """Have the daemon take no new work; returns when nothing runs any more."""
        expect(await self._call(m.Drain(id=self._exchange.next_id())), m.Drained)

    async def shutdown(self, *, force: bool = False) -> None:
        """Have the daemon drain and exit; returns when it is about to."""
        expect(await self._call(m.Shutdown(id=self._exchange.next_id(), force=force)), m.Bye)

    async def _quick(self, request: m.Request) -> m.Event:
        try:
            # `wait_for` may lose a cancellation that comes with the answer (Python 3.11).
            async with asyncio.timeout(QUICK_S):
                return await self._call(request)
        except TimeoutError as error:
            raise silent(QUICK_S) from error

    async def _call(self, request: m.Request) -> m.Event:
        try:
            await self._send(request)
            return await self._next(request.id)
        finally:  # after a timeout nobody asks for the rest any more
            self._news.pop(request.id, None)
            self._exchange.forget(request.id)

    async def _send(self, request: m.Request) -> None:
        assert self._writer is not None, "connect first, or use `async with`"
        line = self._exchange.request(request)
        self._news[request.id] = asyncio.Event()
        self._writer.write(line)
        try:
            await self._writer.drain()
        except ConnectionError:
            self._lose()

    async def _next(self, request_id: str) -> m.Event:
        news = self._news[request_id]
        while True:
            news.clear()
            try:
                event = self._exchange.take(request_id)
            except BaseException:
                self._news.pop(request_id, None)
                raise
            if event is not None:
                if m.is_last(event):
                    del self._news[request_id]
                return event
            await news.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(_CHUNK):
                self._exchange.receive(data)
                self._wake()
        except ConnectionError:
            pass
        finally:  # also when `close` ends us: others may wait
            self._lose()

    def _lose(self) -> None:
        self._exchange.fail(lost())
        self._wake()

    def _wake(self) -> None:
        for news in self._news.values():
            news.set()


class AsyncCompletion(CompletionRecord):
    """A running completion: an async iterator of its events, and what they add up to."""

    def __init__(self, client: AsyncClient, request_id: str, count: int) -> None:
        super().__init__(count)
        self.id = request_id
        self._client = client

    async def __aiter__(self) -> AsyncIterator[m.Event]:
        """Yield the events that are left, up to and with `Done`; raises the request's error."""
        while self.reason is None:
            event = await self._client._next(self.id)  # noqa: SLF001 - the other half of one class
            self._apply(event)
            yield event

    async def text(self) -> str:
        """Return the whole text, of the first choice; waits for what is missing."""
        async for _ in self:
            pass
        return self.text_so_far

    async def cancel(self) -> None:
        """End the completion; the events that are left end with `Done`."""
        if self.reason is None:
            await self._client.cancel(self.id)


class AsyncLoad(LoadRecord):
    """A running load: an async iterator of its progress, and its result."""

    def __init__(self, client: AsyncClient, request_id: str) -> None:
        super().__init__()
        self.id = request_id
        self._client = client

    async def __aiter__(self) -> AsyncIterator[m.Event]:
        """Yield the events that are left, up to and with `Loaded`; raises the load's error."""
        while self.model is None:
            event = await self._client._next(self.id)  # noqa: SLF001 - the other half of one class
            self._apply(event)
            yield event

    async def result(self) -> ModelStatus:
        """Return the loaded model; waits for it."""
        async for _ in self:
            pass
        assert self.model is not None
        return self.model
