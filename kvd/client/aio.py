"""`AsyncClient`: many requests at once over one connection, on an asyncio loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from kvd.client import exchange
from kvd.client.calls import Calls, E
from protocol import messages as m
from protocol.types import ModelStatus


class AsyncClient(Calls["AsyncCompletion", "AsyncLoad"]):
    """A connection to the daemon: ``async with AsyncClient() as kvd: ...``."""

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._path: Path = exchange.socket_path(socket, home)
        self._arrived: dict[str, asyncio.Event] = {}
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
            raise exchange.unreachable(self._path, error) from error
        self._reading = asyncio.create_task(self._read(reader), name="kvd client")

    async def close(self) -> None:
        """Close the connection; the daemon cancels its unfinished completions."""
        if self._writer is None or self._reading is None:
            return
        self._exchange.fail(exchange.closed())
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def _quick(self, request: m.Request, reply: type[E]) -> E:
        try:
            # `wait_for` may lose a cancellation that arrives with the reply (Python 3.11).
            async with asyncio.timeout(exchange.QUICK_S):
                return await self._call(request, reply)
        except TimeoutError as error:
            raise exchange.silent(exchange.QUICK_S) from error

    async def _send(self, request: m.Request) -> None:
        assert self._writer is not None, "connect first, or use `async with`"
        line = self._exchange.request(request)
        self._arrived[request.id] = asyncio.Event()
        self._writer.write(line)
        try:
            await self._writer.drain()
        except ConnectionError:
            self._lose()

    async def _next(self, request_id: str) -> m.Event:
        arrived = self._arrived[request_id]
        while True:
            arrived.clear()
            try:
                event = self._exchange.take(request_id)
            except BaseException:
                self._arrived.pop(request_id, None)
                raise
            if event is not None:
                if m.is_last(event):
                    del self._arrived[request_id]
                return event
            await arrived.wait()

    def _forget(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)
        super()._forget(request_id)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(exchange.RECEIVE_BYTES):
                self._exchange.receive(data)
                self._wake()
        except ConnectionError:
            pass
        finally:  # also when `close` cancels this task: requests may be waiting
            self._lose()

    def _lose(self) -> None:
        self._exchange.fail(exchange.lost())
        self._wake()

    def _wake(self) -> None:
        for arrived in self._arrived.values():
            arrived.set()

    def _completion(self, request_id: str, count: int) -> AsyncCompletion:
        return AsyncCompletion(self, request_id, count)

    def _load(self, request_id: str) -> AsyncLoad:
        return AsyncLoad(self, request_id)


class AsyncCompletion(exchange.CompletionRecord):
    """A running completion: an async iterator of its events, which also collects the results."""

    def __init__(self, client: AsyncClient, request_id: str, count: int) -> None:
        super().__init__(count)
        self.id = request_id
        self._client = client

    async def __aiter__(self) -> AsyncIterator[m.Event]:
        """Yield the remaining events including `Done`; raises the request's error."""
        while self.reason is None:
            event = await self._client._next(self.id)  # noqa: SLF001 - same module
            self._apply(event)
            yield event

    async def text(self) -> str:
        """Wait for the end and return the text of the first choice."""
        async for _ in self:
            pass
        return self.text_so_far

    async def cancel(self) -> None:
        """Cancel the completion; its remaining events still end with `Done`."""
        if self.reason is None:
            await self._client.cancel(self.id)


class AsyncLoad(exchange.LoadRecord):
    """A running load: an async iterator of its progress, and its result."""

    def __init__(self, client: AsyncClient, request_id: str) -> None:
        super().__init__()
        self.id = request_id
        self._client = client

    async def __aiter__(self) -> AsyncIterator[m.Event]:
        """Yield the remaining events including `Loaded`; raises the load's error."""
        while self.model is None:
            event = await self._client._next(self.id)  # noqa: SLF001 - same module
            self._apply(event)
            yield event

    async def result(self) -> ModelStatus:
        """Wait for the end and return the loaded model."""
        async for _ in self:
            pass
        assert self.model is not None
        return self.model
