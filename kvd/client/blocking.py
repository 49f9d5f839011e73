"""`Client`: blocking calls over one connection, for scripts and for `kvctl`.

Not thread-safe. Requests may overlap: their events are kept in memory until they are read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket as sockets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvd.client import exchange
from kvd.client.calls import Calls, E
from protocol import messages as m
from protocol.types import ModelStatus

P = ParamSpec("P")
R = TypeVar("R")


class _Connection(Calls["Completion", "Load"]):
    """Calls over a blocking socket. The coroutines block and never suspend."""

    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise exchange.unreachable(path, error) from error

    def close(self) -> None:
        self._exchange.fail(exchange.closed())
        self._socket.close()

    def cancel_soon(self, target: str) -> None:
        _run(self._send_cancel(target))

    def next_event(self, request_id: str, on_silence: Callable[[], None] | None = None) -> m.Event:
        """Return the next event; call ``on_silence`` once if none arrives for `QUICK_S`."""
        while (event := self._exchange.take(request_id)) is None:
            if on_silence is not None and not self._readable(exchange.QUICK_S):
                on_silence()
                on_silence = None
                continue
            try:
                data = self._socket.recv(exchange.RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            if data:
                self._exchange.receive(data)
            else:
                self._exchange.fail(exchange.lost())
        return event

    async def _quick(self, request: m.Request, reply: type[E]) -> E:
        self._exchange.check()
        timeout_s = self._timeout_s or exchange.QUICK_S
        self._socket.settimeout(timeout_s)
        try:
            return await self._call(request, reply)
        except TimeoutError as error:
            raise exchange.silent(timeout_s) from error
        finally:
            self._socket.settimeout(None)

    async def _send(self, request: m.Request) -> None:
        line = self._exchange.request(request)
        # If the daemon has closed the connection, `_next` reads its last events and then the end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(line)

    async def _next(self, request_id: str) -> m.Event:
        return self.next_event(request_id)

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _completion(self, request_id: str, count: int) -> Completion:
        return Completion(self, request_id, count)

    def _load(self, request_id: str) -> Load:
        return Load(self, request_id)


def _run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("the blocking transport suspended")


def _blocking(
    call: Callable[Concatenate[_Connection, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Client, P], R]:
    @functools.wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _run(call(client._connection, *args, **kwargs))  # noqa: SLF001 - same module

    return method


def _iterating(
    call: Callable[Concatenate[_Connection, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Client, P], Iterator[R]]:
    @functools.wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        generator = call(client._connection, *args, **kwargs)  # noqa: SLF001 - same module
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield _run(generator.asend(None))
        finally:
            _run(generator.aclose())

    return method


class Client:
    """A connection to the daemon; a context manager that closes it."""

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Connect. ``timeout_s`` limits calls that the daemon answers at once, such as status."""
        self._connection = _Connection(exchange.socket_path(socket, home), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the daemon cancels its unfinished completions."""
        self._connection.close()

    hello = _blocking(_Connection.hello)
    status = _blocking(_Connection.status)
    metrics = _blocking(_Connection.metrics)
    load = _blocking(_Connection.load)
    unload = _blocking(_Connection.unload)
    pin = _blocking(_Connection.pin)
    configure = _blocking(_Connection.configure)
    reload = _blocking(_Connection.reload)
    events = _iterating(_Connection.events)
    generate = _blocking(_Connection.generate)
    embed = _blocking(_Connection.embed)
    attach = _blocking(_Connection.attach)
    cancel = _blocking(_Connection.cancel)
    explain = _blocking(_Connection.explain)
    explain_requests = _blocking(_Connection.explain_requests)
    cache = _blocking(_Connection.cache)
    cache_drop = _blocking(_Connection.cache_drop)
    tokenize = _blocking(_Connection.tokenize)
    drain = _blocking(_Connection.drain)
    shutdown = _blocking(_Connection.shutdown)


class Completion(exchange.CompletionRecord):
    """A running completion: an iterator of its events, which also collects the results."""

    def __init__(self, connection: _Connection, request_id: str, count: int) -> None:
        super().__init__(count)
        self.id = request_id
        self.on_silence: Callable[[], None] | None = None
        """Called once if no event arrives for ten seconds; the wait continues."""
        self._connection = connection

    def __iter__(self) -> Iterator[m.Event]:
        """Yield the remaining events including `Done`; raises the request's error."""
        while self.reason is None:
            event = self._connection.next_event(self.id, self._report_silence)
            self._apply(event)
            yield event

    def _report_silence(self) -> None:
        callback, self.on_silence = self.on_silence, None
        if callback is not None:
            callback()

    @property
    def text(self) -> str:
        """The text of the first choice; waits for its end."""
        for _ in self:
            pass
        return self.text_so_far

    def cancel(self) -> None:
        """Cancel the completion without waiting; its remaining events still end with `Done`.

        Safe to call from a signal handler while the events are read.
        """
        if self.reason is None:
            self._connection.cancel_soon(self.id)


class Load(exchange.LoadRecord):
    """A running load: an iterator of its progress, and its result."""

    def __init__(self, connection: _Connection, request_id: str) -> None:
        super().__init__()
        self.id = request_id
        self._connection = connection

    def __iter__(self) -> Iterator[m.Event]:
        """Yield the remaining events including `Loaded`; raises the load's error."""
        while self.model is None:
            event = self._connection.next_event(self.id)
            self._apply(event)
            yield event

    @property
    def result(self) -> ModelStatus:
        """The loaded model; waits for the end of the load."""
        for _ in self:
            pass
        assert self.model is not None
        return self.model
