"""The calls that both clients offer, each written once as a coroutine.

Imports no asyncio. `kvd.client.aio` awaits the coroutines on an event loop. `kvd.client.blocking`
runs them to their end without one: its transport blocks instead of suspending.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from math import isfinite
from typing import Any, Generic, TypeVar, Unpack

from kvd.client.exchange import CompletionRecord, Exchange, LoadRecord
from kvd.client.options import Messages, Options, chat_messages, generate_request
from protocol import messages as m
from protocol.cache_outcome import RequestOutcome
from protocol.embedding import Embed, vector_of
from protocol.errors import InvalidRequest, KvdError, LocalProtocolError
from protocol.explain_messages import (
    Explain,
    Explained,
    ExplainedRequests,
    ExplainRequest,
)
from protocol.forecast import Forecast
from protocol.kv import KVSpec
from protocol.policy import PolicyChange
from protocol.prefix_messages import Cache, CacheDrop, CacheDropped, CacheReply
from protocol.types import DaemonStatus

C = TypeVar("C", bound=CompletionRecord)
L = TypeVar("L", bound=LoadRecord)
E = TypeVar("E")


class Calls(ABC, Generic[C, L]):
    """Requests of one connection and their replies; subclasses send and receive."""

    def __init__(self) -> None:
        self._exchange = Exchange()

    async def hello(self) -> m.HelloReply:
        """Return the daemon's version and process id."""
        return await self._quick(m.Hello(id=self._exchange.next_id()), m.HelloReply)

    async def status(self) -> DaemonStatus:
        """Return everything that `kvctl status` shows."""
        reply = await self._quick(m.Status(id=self._exchange.next_id()), m.StatusReply)
        return reply.status

    async def metrics(self) -> str:
        """Return all metrics in Prometheus's text format."""
        reply = await self._quick(m.Metrics(id=self._exchange.next_id()), m.MetricsReply)
        return reply.text

    async def cache(self) -> CacheReply:
        """Return what the prefix store contains, and its limits."""
        return await self._quick(Cache(id=self._exchange.next_id()), CacheReply)

    async def cache_drop(
        self, *, model: str | None = None, unused_s: float | None = None
    ) -> CacheDropped:
        """Delete prefixes from the prefix store: those that meet all conditions, or all."""
        number = self._exchange.next_id()
        request = CacheDrop(id=number, model=model, unused_s=unused_s)
        return await self._call(request, CacheDropped)

    async def load(
        self,
        model: str,
        *,
        alias: str | None = None,
        kv: KVSpec | None = None,
        policy: PolicyChange | None = None,
    ) -> L:
        """Load a model; iterate over the progress, or wait for the result.

        Without ``kv``, a known model keeps its settings. Absent fields of ``policy`` keep their
        values.
        """
        number = self._exchange.next_id()
        change = policy or PolicyChange()
        await self._send(m.Load(id=number, model=model, alias=alias, kv=kv, policy=change))
        return self._load(number)

    async def unload(self, model: str, *, force: bool = False) -> m.Unloaded:
        """Unload a model after its requests, or at once with ``force``.

        Returns when its memory is free.
        """
        request = m.Unload(id=self._exchange.next_id(), model=model, force=force)
        return await self._call(request, m.Unloaded)

    async def pin(self, model: str, *, pinned: bool = True) -> m.Pinned:
        """Pin a model, so that it is never evicted, or unpin it."""
        number = self._exchange.next_id()
        request = m.Pin(id=number, model=model) if pinned else m.Unpin(id=number, model=model)
        return await self._quick(request, m.Pinned)

    async def configure(
        self,
        *,
        budget_bytes: int | None = None,
        settings: Mapping[str, Any] | None = None,
        table: bool = False,
    ) -> m.Configured:
        """Change settings by key until the daemon ends; return the values in effect.

        None as a value restores the value of the file. ``table`` adds all settings to the reply.
        Raises `InvalidRequest` for NaN and infinity, which JSON does not have: sent, they would
        become None.
        """
        for key, value in (settings or {}).items():
            if isinstance(value, float) and not isfinite(value):
                raise InvalidRequest(f"{key} must be a finite number, not {value}", field=key)
        request = m.Configure(
            id=self._exchange.next_id(),
            budget_bytes=budget_bytes,
            settings=dict(settings or {}),
            table=table,
        )
        return await self._quick(request, m.Configured)

    async def reload(self) -> m.Configured:
        """Make the daemon read `config.toml` again; return the changes.

        Raises `ConfigError` for an invalid file, which changes nothing.
        """
        return await self._quick(m.Reload(id=self._exchange.next_id()), m.Configured)

    async def events(
        self, model: str | None = None, *, since: int = 0, follow: bool = False
    ) -> AsyncGenerator[m.EventRecord, None]:
        """Yield what the daemon did to models and why, from event number ``since``.

        ``follow`` waits for further events instead of ending.
        """
        number = self._exchange.next_id()
        await self._send(m.Events(id=number, model=model, since=since, follow=follow))
        event: m.Event | None = None
        try:
            while isinstance(event := await self._next(number), m.EventRecord):
                yield event
        finally:
            if isinstance(event, m.EventRecord):  # the caller stopped before the end
                self._forget(number)
                await self._send_cancel(number)

    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: list[int] | None = None,
        **options: Unpack[Options],
    ) -> C:
        """Complete a prompt; iterate over the events, or wait for the text.

        `kvd.client.options.Options` lists all options.
        """
        number = self._exchange.next_id()
        request = generate_request(number, model, prompt, messages, tokens, options)
        await self._send(request)
        return self._completion(number, request.n)

    async def embed(
        self,
        model: str,
        prompt: str | None = None,
        *,
        tokens: list[int] | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        keep_alive_s: float | None = None,
    ) -> list[float]:
        """Return the embedding of a text, a vector of length 1.

        ``dimensions``: numbers of the vector; fewer than the model's are its first, normalized.
        """
        number = self._exchange.next_id()
        request = Embed(
            id=number,
            model=model,
            prompt=prompt,
            tokens=tokens,
            dimensions=dimensions,
            priority=priority,
            deadline_s=deadline_s,
            keep_alive_s=keep_alive_s,
        )
        await self._send(request)
        try:
            while not isinstance(event := await self._next(number), m.Done):
                pass
        except KvdError:
            raise
        except BaseException:  # the caller was interrupted
            self._forget(number)
            await self._send_cancel(number)
            raise
        if event.embedding is None:
            raise LocalProtocolError("the request ended without a vector")
        return vector_of(event.embedding)

    async def attach(self, request: str | CompletionRecord, *, choices: int = 1) -> C:
        """Continue a completion whose daemon died; requires ``journal = "disk"``.

        ``request`` is a completion, whose stream continues where it stopped, or its `request` id.
        With the id, all events are returned again from the start, for ``choices`` choices.
        """
        number = self._exchange.next_id()
        if isinstance(request, str):
            await self._send(m.Attach(id=number, request=request))
            return self._completion(number, choices)
        await self._send(request.attach_request(number))
        completion = self._completion(number, len(request.choices))
        completion.continue_from(request)
        return completion

    async def cancel(self, target: str) -> bool:
        """Cancel another request of this connection; return whether it was still running."""
        request = m.Cancel(id=self._exchange.next_id(), target=target)
        return (await self._quick(request, m.Cancelled)).found

    async def explain(
        self,
        model: str,
        *,
        rows: int = 1,
        context: int | None = None,
        kv: KVSpec | None = None,
        ranks: int | None = None,
        device: int | None = None,
    ) -> Forecast:
        """Return the memory that ``rows`` rows need, and what would be reclaimed for them."""
        number = self._exchange.next_id()
        request = Explain(
            id=number,
            model=model,
            rows=rows,
            context=context,
            kv=kv,
            ranks=ranks,
            device=device,
        )
        return (await self._call(request, Explained)).forecast

    async def explain_requests(self, request: str | None = None) -> list[RequestOutcome]:
        """Return what the prefix cache did for the requests with an id, or the newest ones."""
        asked = ExplainRequest(id=self._exchange.next_id(), request=request)
        return (await self._quick(asked, ExplainedRequests)).requests

    async def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        limit: int = m.MAX_LISTED_TOKENS,
        texts: bool = False,
    ) -> m.Tokenized:
        """Return the tokens of a text, at most ``limit`` of them; 0 returns only the count.

        ``messages`` go through the model's chat template. The model itself does not run.
        """
        request = m.Tokenize(
            id=self._exchange.next_id(),
            model=model,
            prompt=prompt,
            messages=chat_messages(messages),
            limit=limit,
            texts=texts,
        )
        return await self._call(request, m.Tokenized)

    async def drain(self) -> None:
        """Make the daemon refuse new requests; return when all running ones have finished."""
        await self._call(m.Drain(id=self._exchange.next_id()), m.Drained)

    async def shutdown(self, *, force: bool = False) -> None:
        """Drain the daemon and end it; returns shortly before the process exits."""
        await self._call(m.Shutdown(id=self._exchange.next_id(), force=force), m.ShutdownReply)

    async def _call(self, request: m.Request, reply: type[E]) -> E:
        try:
            await self._send(request)
            event = await self._next(request.id)
        finally:  # after a timeout the reply may still arrive
            self._forget(request.id)
        if isinstance(event, reply):
            return event
        raise LocalProtocolError(f"expected {reply.__name__}, got {event!r}")

    async def _send_cancel(self, target: str) -> None:
        """Cancel a request without waiting for the reply."""
        number = self._exchange.next_id()
        await self._send(m.Cancel(id=number, target=target))
        self._forget(number)

    def _forget(self, request_id: str) -> None:
        self._exchange.forget(request_id)

    @abstractmethod
    async def _quick(self, request: m.Request, reply: type[E]) -> E:
        """Call something that the daemon answers at once; raises `NotRunning` after a timeout."""

    @abstractmethod
    async def _send(self, request: m.Request) -> None: ...

    @abstractmethod
    async def _next(self, request_id: str) -> m.Event: ...

    @abstractmethod
    def _completion(self, request_id: str, count: int) -> C: ...

    @abstractmethod
    def _load(self, request_id: str) -> L: ...
