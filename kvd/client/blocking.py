"""`Client`: blocking calls over one connection, for scripts and for `kvctl`.

One thread at a time. Requests may overlap: events of one that is not being read wait in memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket as sockets
from collections.abc import Callable, Iterator, Mapping
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


class Client:
    """A connection to the daemon; a context manager that closes it."""

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Connect; ``timeout_s``: how long hello, status and cancel may take."""
        self._timeout_s = timeout_s
        path = socket_path(socket, home)
        self._exchange = Exchange()
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise unreachable(path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the daemon cancels the completions that it still had."""
        self._exchange.fail(closed())
        self._socket.close()

    def hello(self) -> m.HelloReply:
        """Ask who is there."""
        return expect(self._quick(m.Hello(id=self._exchange.next_id())), m.HelloReply)

    def status(self) -> DaemonStatus:
        """Ask for everything that `kvctl status` shows."""
        reply = self._quick(m.Status(id=self._exchange.next_id()))
        return expect(reply, m.StatusReply).status

    def metrics(self) -> str:
        """Ask for what Prometheus reads, in its text format."""
        reply = self._quick(m.Metrics(id=self._exchange.next_id()))
        return expect(reply, m.MetricsReply).text

    def load(
        self,
        model: str,
        *,
        alias: str | None = None,
        kv: KVSpec | None = None,
        policy: ModelPolicy | None = None,
    ) -> Load:
        """Load a model; iterate over the progress, or take `.result`."""
        number = self._exchange.next_id()
        self._send(m.Load(id=number, model=model, alias=alias, kv=kv or KVSpec(), policy=policy))
        return Load(self, number)

    def unload(self, model: str, *, force: bool = False) -> m.Unloaded:
        """Unload a model, after its requests unless forced; returns when its memory is free."""
        request = m.Unload(id=self._exchange.next_id(), model=model, force=force)
        return expect(self._call(request), m.Unloaded)

    def pin(self, model: str, *, pinned: bool = True) -> m.Pinned:
        """Never have a model unloaded to make room; or let that be so again."""
        number = self._exchange.next_id()
        request = m.Pin(id=number, model=model) if pinned else m.Unpin(id=number, model=model)
        return expect(self._quick(request), m.Pinned)

    def configure(
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
        return expect(self._quick(request), m.Configured)

    def events(
        self, model: str | None = None, *, since: int = 0, follow: bool = False
    ) -> Iterator[m.Happened]:
        """Tell what was done to models and why, from number ``since`` on; `follow`: and will be."""
        number = self._exchange.next_id()
        self._send(m.Events(id=number, model=model, since=since, follow=follow))
        event: m.Event | None = None
        try:
            while isinstance(event := self._next(number), m.Happened):
                yield event
        finally:
            if isinstance(event, m.Happened):  # whoever reads has enough
                self._cancel_soon(number)
                self._exchange.forget(number)

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: list[int] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Complete a prompt; iterate over the events, or take `.text`.

        All that a request may say is in `kvd.client.options.Options`.
        """
        number = self._exchange.next_id()
        request = generate_request(number, model, prompt, messages, tokens, options)
        self._send(request)
        return Completion(self, number, request.n)

    def attach(self, request: str | CompletionRecord, *, choices: int = 1) -> Completion:
        """Get the rest of a completion whose daemon died; its journal must be on disk.

        By the completion itself, which what comes is added to, or by its `request`: then all of it
        comes, of so many ``choices``.
        """
        number = self._exchange.next_id()
        self._send(attach_request(number, request))
        count = choices if isinstance(request, str) else len(request.choices)
        completion = Completion(self, number, count)
        if not isinstance(request, str):
            completion.take_over(request)
        return completion

    def cancel(self, target: str) -> bool:
        """End another request of this connection; return whether it still ran."""
        reply = self._quick(m.Cancel(id=self._exchange.next_id(), target=target))
        return expect(reply, m.Cancelled).found

    def explain(
        self, model: str, *, rows: int = 1, context: int | None = None, kv: KVSpec | None = None
    ) -> Forecast:
        """Ask what so many rows of a model would take, and what would make room for them."""
        number = self._exchange.next_id()
        request = m.Explain(id=number, model=model, rows=rows, context=context, kv=kv)
        return expect(self._call(request), m.Explained).forecast

    def tokenize(
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
        return expect(self._call(request), m.Tokenized)

    def drain(self) -> None:
        """Have the daemon take no new work; returns when nothing runs any more."""
        expect(self._call(m.Drain(id=self._exchange.next_id())), m.Drained)

    def shutdown(self, *, force: bool = False) -> None:
        """Have the daemon drain and exit; returns when it is about to."""
        expect(self._call(m.Shutdown(id=self._exchange.next_id(), force=force)), m.Bye)

    def _cancel_soon(self, target: str) -> None:
        self._send(m.Cancel(id=self._exchange.next_id(), target=target))

    def _quick(self, request: m.Request) -> m.Event:
        self._exchange.check()
        patience = self._timeout_s or QUICK_S
        self._socket.settimeout(patience)
        try:
            return self._call(request)
        except TimeoutError as error:
            raise silent(patience) from error
        finally:
            self._socket.settimeout(None)

    def _call(self, request: m.Request) -> m.Event:
        try:
            self._send(request)
            return self._next(request.id)
        finally:  # after a timeout nobody asks for the rest any more
            self._exchange.forget(request.id)

    def _send(self, request: m.Request) -> None:
        line = self._exchange.request(request)
        # If the daemon has hung up, `_next` reads its last words, and then the end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(line)

    def _next(self, request_id: str, patience: Callable[[], None] | None = None) -> m.Event:
        while (event := self._exchange.take(request_id)) is None:
            if patience is not None and not self._readable(QUICK_S):
                patience()
                patience = None
            try:
                data = self._socket.recv(_CHUNK)
            except ConnectionResetError:
                data = b""
            if data:
                self._exchange.receive(data)
            else:
                self._exchange.fail(lost())
        return event

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))


class Completion(CompletionRecord):
    """A running completion: an iterator of its events, and what they add up to."""

    def __init__(self, client: Client, request_id: str, count: int) -> None:
        super().__init__(count)
        self.id = request_id
        self.on_silence: Callable[[], None] | None = None
        """Called once if no event comes for ten seconds; the wait goes on."""
        self._client = client

    def __iter__(self) -> Iterator[m.Event]:
        """Yield the events that are left, up to and with `Done`; raises the request's error."""
        while self.reason is None:
            event = self._client._next(self.id, self._silent)  # noqa: SLF001 - half of one class
            self._apply(event)
            yield event

    def _silent(self) -> None:
        told, self.on_silence = self.on_silence, None
        if told is not None:
            told()

    @property
    def text(self) -> str:
        """The whole text, of the first choice; waits for what is missing."""
        for _ in self:
            pass
        return self.text_so_far

    def cancel(self) -> None:
        """End the completion, without waiting; the events that are left end with `Done`.

        May be called from a signal handler while the events are read.
        """
        if self.reason is None:
            self._client._cancel_soon(self.id)  # noqa: SLF001 - the other half of one class


class Load(LoadRecord):
    """A running load: an iterator of its progress, and its result."""

    def __init__(self, client: Client, request_id: str) -> None:
        super().__init__()
        self.id = request_id
        self._client = client

    def __iter__(self) -> Iterator[m.Event]:
        """Yield the events that are left, up to and with `Loaded`; raises the load's error."""
        while self.model is None:
            event = self._client._next(self.id)  # noqa: SLF001 - the other half of one class
            self._apply(event)
            yield event

    @property
    def result(self) -> ModelStatus:
        """The loaded model; waits for it."""
        for _ in self:
            pass
        assert self.model is not None
        return self.model
