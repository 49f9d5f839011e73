"""The actor of one client connection: its session and its socket.

When the connection ends, its running requests are cancelled and its waiting texts dropped; its
loads continue.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

from msgspec.structs import replace

from actors import mail
from actors.cache_outcomes import CacheOutcomes
from actors.event_log import EventLog, concerns
from actors.machines import admission_events
from actors.ports import Configuration, Metrics
from actors.prefix_store import PrefixStoreState
from actors.runtime.actor import Actor, MailboxFull, Ref
from actors.tokenizing import TokenizeRequests
from protocol import messages
from protocol.embedding import Embed
from protocol.errors import InternalError, InvalidRequest, KvdError, Overloaded, SlowReader
from protocol.explain_messages import (
    Explain,
    Explained,
    ExplainedRequests,
    ExplainRequest,
)
from protocol.forecast import Forecast
from protocol.message_base import VERSION
from protocol.messages import Event, Request
from protocol.prefix_messages import Cache, CacheDrop, CacheDropped, CacheReply
from protocol.session import ServerSession
from protocol.settings import Changed
from protocol.types import DaemonStatus, Problem

R = TypeVar("R")

MAX_OPEN_REQUESTS = 1024
"""Open requests of one connection; more than any batch can use."""


@dataclass(frozen=True)
class Socket:
    """The three operations of a client's socket; see `System.connect`."""

    write: Callable[[bytes], None]
    close: Callable[[], None]
    backlog: Callable[[], int]


@dataclass(frozen=True)
class Identity:
    """The daemon's identity in ``hello`` and ``status`` replies."""

    version: str
    home: str
    pid: int
    http: tuple[str, ...] = ()
    """Addresses of the HTTP interface."""


@dataclass(frozen=True)
class ClientServices:
    """The actors, ports and settings that all clients share."""

    router: Ref[mail.RouterMail]
    registry: Ref[mail.RegistryMail]
    governor: Ref[mail.GovernorMail]
    events: EventLog
    outcomes: CacheOutcomes
    tokenizing: TokenizeRequests
    explain: Callable[[Explain], Coroutine[Any, Any, Forecast]]
    configuration: Configuration
    status: Callable[[], DaemonStatus]
    problems: Callable[[], list[Problem]]
    prefix_store: PrefixStoreState
    prefix_store_ref: Ref[mail.PrefixStoreMail]
    metrics: Metrics
    rid_prefix: str
    """Separates this daemon's request ids from those of earlier daemons in the journal."""
    identity: Identity
    slow_reader_bytes: int

    async def configure(self, request: messages.Configure) -> messages.Configured:
        changes = await self.configuration.change(request.settings) if request.settings else []
        if request.budget_bytes is not None:
            await self.configuration.budget_changed(request.budget_bytes)
        reply = await self._configured(request, changes, request.budget_bytes)
        return replace(reply, settings=self.configuration.table) if request.table else reply

    async def reload(self, request: messages.Reload) -> messages.Configured:
        return await self._configured(request, await self.configuration.reload())

    async def drop_prefixes(self, request: CacheDrop) -> CacheDropped:
        drop = mail.DropSegments(request.model, request.unused_s)
        segments, freed = await self.prefix_store_ref.ask(drop)
        return CacheDropped(id=request.id, segments=segments, freed_bytes=freed)

    async def _configured(
        self, request: Request, changes: list[Changed], new_budget: int | None = None
    ) -> messages.Configured:
        budget, granted = await self.governor.ask(mail.BudgetRequest(new_budget))
        return messages.Configured(
            id=request.id,
            budget_bytes=budget,
            granted_bytes=granted,
            changes=changes,
            problems=self.problems(),
        )


class Client(Actor[mail.ClientMail]):
    """One connection."""

    def __init__(self, number: int, socket: Socket, services: ClientServices) -> None:
        self._number = number
        self._socket: Socket | None = socket
        self._services = services
        self._session = ServerSession()
        self._rids: dict[str, str] = {}
        """The daemon's ids of running requests by the client's ids."""
        self._following: dict[str, str | None] = {}
        """The model filter of each open ``events`` request with ``follow``, by request id."""
        self._count = 0
        self._saved_bytes = 0
        """Bytes of saved events written since the backlog was last within its limit."""
        self._has_texts = False
        """Whether the client sent ``tokenize`` requests, which may still wait."""

    def receive(self, message: mail.ClientMail) -> None:
        """Handle a message; a failure sends an error and closes the connection."""
        try:
            self._handle(message)
        except Exception:
            self._write_final_error(
                InternalError("kvd failed in this connection; its log has the reason")
            )
            raise

    def _handle(self, message: mail.ClientMail) -> None:
        match message:
            case mail.BytesReceived(data=data):
                self._read(data)
            case mail.ConnectionClosed():
                self._socket = None
                self.stop()
            case mail.Deliver(event=event, saved=saved):
                self._send(event, saved=saved)
            case _:
                assert_never(message)

    def on_stop(self) -> None:
        for key in list(self._following):
            self._unfollow(key)
        rids, self._rids = self._rids, {}
        for rid in rids.values():
            self._services.router.tell(_cancellation(rid), beyond_limit=True)
        if self._has_texts:
            self._services.registry.tell(mail.CancelTokenize(self.ref), beyond_limit=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _read(self, data: bytes) -> None:
        for found in self._session.receive(data):
            if isinstance(found, messages.Error):
                self._write(self._session.refuse(found))
            else:
                self._serve(found)
        if self._session.closing:
            self.stop()

    def _serve(self, request: Request) -> None:
        if len(self._session.open) > MAX_OPEN_REQUESTS:
            error = Overloaded(
                f"{MAX_OPEN_REQUESTS} requests run on this connection; wait until one has ended",
                retry_after_s=1.0,
            )
            self._fail(request.id, error)
            return
        try:
            self._start(request)
        except MailboxFull as error:
            self._fail(request.id, Overloaded(error.message, retry_after_s=1.0))

    def _start(self, request: Request) -> None:  # noqa: C901, PLR0912 - one match
        services, key = self._services, request.id
        match request:
            case messages.Hello():
                identity = services.identity
                self._send(
                    messages.HelloReply(
                        id=key,
                        version=identity.version,
                        protocol=VERSION,
                        pid=identity.pid,
                        home=identity.home,
                    )
                )
            case messages.Status():
                self._send(messages.StatusReply(id=key, status=services.status()))
            case messages.Metrics():
                work = services.metrics()
                self._answer(key, work, lambda text: messages.MetricsReply(id=key, text=text))
            case messages.Generate():
                self._run(request, journaled=True)
            case Embed():
                self._run(request, journaled=False)
            case messages.Attach():
                self._attach(request)
            case messages.Cancel(target=target):
                self._send(messages.Cancelled(id=key, target=target, found=self._cancel(target)))
            case messages.Shutdown(force=force):
                services.registry.tell(mail.Shutdown(force, mail.Watcher(self.ref, key)))
            case messages.Events():
                self._send_events(request)
            case ExplainRequest(request=name):
                self._send(ExplainedRequests(id=key, requests=services.outcomes.find(name)))
            case Explain():
                explained = services.explain(request)
                self._answer(key, explained, lambda it: Explained(id=key, forecast=it))
            case messages.Tokenize():
                self._has_texts = True
                tokenized = services.tokenizing.tokenize(request, self.ref)
                self._answer(key, tokenized, lambda reply: reply)
            case Cache():
                store = services.prefix_store
                self._send(CacheReply(id=key, store=store.status(), spaces=store.spaces()))
            case CacheDrop():
                self._answer(key, services.drop_prefixes(request), lambda reply: reply)
            case messages.Configure():
                self._answer(key, services.configure(request), lambda reply: reply)
            case messages.Reload():
                self._answer(key, services.reload(request), lambda reply: reply)
            case messages.Pin(model=name) | messages.Unpin(model=name):
                pinned = isinstance(request, messages.Pin)
                self._answer(
                    key,
                    services.registry.ask(mail.SetPolicy(name, {"pinned": pinned})),
                    lambda _: messages.Pinned(id=key, model=name, pinned=pinned),
                )
            case messages.Load() | messages.Unload() | messages.Drain():
                self._ask_registry(request)
            case _:
                assert_never(request)

    def _run(self, request: messages.Generate | Embed, *, journaled: bool) -> None:
        self._count += 1
        rid = f"{self._services.rid_prefix}{self._number}.{self._count}"
        self._services.router.tell(mail.SubmitRequest(rid, request, self.ref, journaled))
        self._rids[request.id] = rid

    def _attach(self, request: messages.Attach) -> None:
        """Attach, unless the client left earlier saved events unread: that bounds their bytes."""
        rid, unread = request.request, 0 if self._socket is None else self._socket.backlog()
        if rid in self._rids.values():
            twice = f"this connection is attached to request {rid!r}; wait until it has ended"
            self._fail(request.id, InvalidRequest(twice, field="request"))
        elif unread > self._services.slow_reader_bytes:
            late = f"{unread} bytes of this connection's events are unread; read them, then attach"
            self._fail(request.id, Overloaded(late, retry_after_s=1.0))
        else:
            self._services.router.tell(mail.AttachRequest(request, self.ref))
            self._rids[request.id] = rid

    def _cancel(self, target: str) -> bool:
        if target in self._following:
            self._unfollow(target)
            self._send(messages.EventsReply(id=target, last=self._services.events.last))
            return True
        rid = self._rids.get(target)
        if rid is not None:
            self._services.router.tell(_cancellation(rid))
        return rid is not None

    def _send_events(self, request: messages.Events) -> None:
        events, key, model = self._services.events, request.id, request.model
        for record in events.since(request.since, model):
            self._send(replace(record, id=key))
        if not request.follow:
            self._send(messages.EventsReply(id=key, last=events.last))
            return
        self._following[key] = model
        events.followers[self, key] = lambda record: self._on_record(key, record)

    def _on_record(self, key: str, record: messages.EventRecord) -> None:
        if concerns(record, self._following[key]):
            self.ref.tell(mail.Deliver(replace(record, id=key)), beyond_limit=True)

    def _unfollow(self, key: str) -> None:
        del self._following[key]
        self._services.events.followers.pop((self, key), None)

    def _ask_registry(self, request: messages.Load | messages.Unload | messages.Drain) -> None:
        key, ask = request.id, self._services.registry.ask
        match request:
            case messages.Load(model=source, alias=alias, kv=kv, policy=policy):
                load = mail.LoadModel(source, alias, kv, policy, mail.Watcher(self.ref, key))
                self._answer(key, ask(load), lambda status: messages.Loaded(id=key, model=status))
            case messages.Unload(model=name, force=force):
                self._answer(
                    key,
                    ask(mail.UnloadModel(name, force)),
                    lambda freed: messages.Unloaded(id=key, model=name, freed_bytes=freed),
                )
            case messages.Drain():
                self._answer(key, ask(mail.Drain()), lambda _: messages.Drained(id=key))
            case _:
                assert_never(request)

    def _answer(
        self, key: str, work: Coroutine[Any, Any, R], to_event: Callable[[R], Event]
    ) -> None:
        """Await work outside the actor, and send its result or its error."""
        ref = self.ref

        def failed(error: Exception) -> None:
            known = error if isinstance(error, KvdError) else InternalError(str(error))
            ref.tell(mail.Deliver(messages.Error(id=key, error=known.info())))

        self.pipe(work, lambda result: ref.tell(mail.Deliver(to_event(result))), failed)

    def _fail(self, key: str, error: KvdError) -> None:
        self._send(messages.Error(id=key, error=error.info()))

    def _send(self, event: Event, *, saved: bool = False) -> None:
        if event.id not in self._session.open:
            return  # progress of a load that was answered meanwhile
        if messages.is_last(event):
            self._rids.pop(event.id, None)
        self._write(self._session.send(event), saved=saved)

    def _write(self, data: bytes, *, saved: bool = False) -> None:
        if self._socket is None or self._stopping:
            return
        limit = self._services.slow_reader_bytes
        if self._socket.backlog() <= limit:
            self._saved_bytes = 0
        if saved:
            self._saved_bytes += len(data)
        self._socket.write(data)
        if self._socket.backlog() > limit + self._saved_bytes:
            error = SlowReader(
                "the client does not read its events; its requests were cancelled",
                limit_bytes=limit,
            )
            self._write_final_error(error)
            self.stop()

    def _write_final_error(self, error: KvdError) -> None:
        if self._socket is not None:
            self._socket.write(self._session.refuse(messages.Error(id="", error=error.info())))


def _cancellation(rid: str) -> mail.AdmissionEvent:
    return mail.AdmissionEvent(admission_events.RequestCancelled(rid))
