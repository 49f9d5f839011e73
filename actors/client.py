"""A client's shell: one for each connection, around the session machine and the socket.

Answers `hello`, `status`, `events` and `cancel` itself, hands `generate` to the router and the rest
to the supervisor and the governor. When the connection ends its generate requests are cancelled,
texts that wait are dropped, and loads go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, assert_never

from msgspec.structs import replace

from actors import mail
from actors.event_log import concerns
from actors.runtime.actor import Actor, MailboxFull
from protocol import messages
from protocol.errors import InternalError, KvdError, Overloaded, SlowReader
from protocol.session import ServerSession

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from actors.event_log import EventLog
    from actors.mail import ClientMail, GovernorMail, RegistryMail, RouterMail
    from actors.ports import Configuration, Metrics
    from actors.runtime.actor import Ref
    from actors.tokenizing import TokenizeRequests
    from protocol import worker as wire
    from protocol.forecast import Forecast
    from protocol.messages import Event, Request
    from protocol.types import DaemonStatus

R = TypeVar("R")

MOST_OPEN = 1024
"""Requests of one connection; above what any batch can use."""


@dataclass(frozen=True)
class Socket:
    """The three things that a client does with its socket; see `System.connect`."""

    write: Callable[[bytes], None]
    close: Callable[[], None]
    backlog: Callable[[], int]


@dataclass(frozen=True)
class Services:
    """What a client needs of the system; the same for all of them."""

    router: Ref[RouterMail]
    supervisor: Ref[RegistryMail]
    governor: Ref[GovernorMail]
    events: EventLog
    texts: TokenizeRequests
    explain: Callable[[messages.Explain], Coroutine[Any, Any, Forecast]]
    configuration: Configuration
    status: Callable[[], DaemonStatus]
    metrics: Metrics
    run: str
    """Sets this daemon's requests apart from those of others that are still kept."""
    version: str
    pid: int
    home: str
    slow_reader_bytes: int

    async def configured(self, asked: messages.Configure) -> messages.Configured:
        """Let it hold; return what holds then."""
        changes = await self.configuration.change(asked.settings) if asked.settings else []
        if asked.budget_bytes is not None:
            await self.configuration.budget_changed(asked.budget_bytes)
        budget, granted = await self.governor.ask(mail.BudgetWanted(asked.budget_bytes))
        return messages.Configured(
            id=asked.id,
            budget_bytes=budget,
            granted_bytes=granted,
            settings=self.configuration.table if asked.table else [],
            changes=changes,
        )


class Client(Actor["ClientMail"]):
    """One connection."""

    def __init__(self, number: int, socket: Socket, services: Services) -> None:
        self._number = number
        self._socket: Socket | None = socket
        self._services = services
        self._session = ServerSession()
        self._rids: dict[str, str] = {}
        """The daemon's ids of the generate requests that run, by their own."""
        self._following: dict[str, str | None] = {}
        """The requests that follow events, and of which model."""
        self._count = 0
        self._has_texts = False
        """It asked for the tokens of some; they may wait still."""

    def receive(self, message: ClientMail) -> None:
        """Handle a message; a failure ends the connection, which is told so first."""
        try:
            self._handle(message)
        except Exception:
            self._say_last(InternalError("kvd failed in this connection; its log has the reason"))
            raise

    def _handle(self, message: ClientMail) -> None:
        match message:
            case mail.Received(data=data):
                self._read(data)
            case mail.Closed():
                self._socket = None
                self.stop()
            case mail.Deliver(event=event):
                self._send(event)
            case _:
                assert_never(message)

    def on_stop(self) -> None:
        """Cancel what runs, and end the connection."""
        for key in list(self._following):
            self._unfollow(key)
        rids, self._rids = self._rids, {}
        for rid in rids.values():
            self._services.router.tell(mail.Unwanted(rid), beyond_limit=True)
        if self._has_texts:
            self._services.supervisor.tell(mail.TokensUnwanted(self.ref), beyond_limit=True)
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
        if len(self._session.open) > MOST_OPEN:
            error = Overloaded(f"{MOST_OPEN} requests run on this connection", retry_after_s=1.0)
            self._fail(request.id, error)
            return
        try:
            self._start(request)
        except MailboxFull as error:
            self._fail(request.id, Overloaded(error.message, retry_after_s=1.0))

    def _start(self, request: Request) -> None:  # noqa: C901, PLR0912 - one match over one union
        services = self._services
        match request:
            case messages.Hello(id=key):
                self._send(
                    messages.HelloReply(
                        id=key,
                        version=services.version,
                        protocol=messages.VERSION,
                        pid=services.pid,
                        home=services.home,
                    )
                )
            case messages.Status(id=key):
                self._send(messages.StatusReply(id=key, status=services.status()))
            case messages.Metrics(id=key):
                self._answer(
                    key,
                    services.metrics(),
                    lambda text: messages.MetricsReply(id=key, text=text),
                )
            case messages.Generate():
                self._generate(request)
            case messages.Attach(id=key):
                services.router.tell(mail.AttachWanted(request, self.ref))
                self._rids[key] = request.request
            case messages.Cancel(id=key, target=target):
                self._send(messages.Cancelled(id=key, target=target, found=self._cancel(target)))
            case messages.Shutdown(id=key, force=force):
                watcher = mail.Watcher(self.ref, key)
                services.supervisor.tell(mail.ShutdownWanted(force, watcher))
            case messages.Events():
                self._tell_events(request)
            case messages.Explain(id=key):
                self._answer(
                    key,
                    services.explain(request),
                    lambda it: messages.Explained(id=key, forecast=it),
                )
            case messages.Tokenize(id=key):
                self._has_texts = True
                asked = services.texts.tokens(request, self.ref)
                self._answer(key, asked, lambda it: _tokens(key, it))
            case messages.Configure(id=key):
                self._answer(key, services.configured(request), lambda it: it)
            case messages.Pin(id=key, model=name) | messages.Unpin(id=key, model=name):
                pinned = isinstance(request, messages.Pin)
                self._answer(
                    key,
                    services.supervisor.ask(mail.PinWanted(name, pinned)),
                    lambda _: messages.Pinned(id=key, model=name, pinned=pinned),
                )
            case messages.Load() | messages.Unload() | messages.Drain():
                self._ask_supervisor(request)
            case _:
                assert_never(request)

    def _generate(self, request: messages.Generate) -> None:
        self._count += 1
        rid = f"{self._services.run}{self._number}.{self._count}"
        self._services.router.tell(mail.Wanted(rid, request, self.ref))
        self._rids[request.id] = rid

    def _cancel(self, target: str) -> bool:
        if target in self._following:
            self._unfollow(target)
            self._send(messages.EventsReply(id=target, last=self._services.events.last))
            return True
        rid = self._rids.get(target)
        if rid is not None:
            self._services.router.tell(mail.Unwanted(rid))
        return rid is not None

    def _tell_events(self, request: messages.Events) -> None:
        events, key, model = self._services.events, request.id, request.model
        for happened in events.since(request.since, model):
            self._send(replace(happened, id=key))
        if not request.follow:
            self._send(messages.EventsReply(id=key, last=events.last))
            return
        self._following[key] = model
        events.followers[self, key] = lambda it: self._happened(key, it)

    def _happened(self, key: str, happened: messages.EventRecord) -> None:
        if concerns(happened, self._following[key]):
            self.ref.tell(mail.Deliver(replace(happened, id=key)), beyond_limit=True)

    def _unfollow(self, key: str) -> None:
        del self._following[key]
        self._services.events.followers.pop((self, key), None)

    def _ask_supervisor(self, request: messages.Load | messages.Unload | messages.Drain) -> None:
        key, ask = request.id, self._services.supervisor.ask
        match request:
            case messages.Load(model=source, alias=alias, kv=kv, policy=policy):
                wanted = mail.LoadWanted(source, alias, kv, policy, mail.Watcher(self.ref, key))
                self._answer(key, ask(wanted), lambda it: messages.Loaded(id=key, model=it))
            case messages.Unload(model=name, force=force):
                self._answer(
                    key,
                    ask(mail.UnloadRequest(name, force)),
                    lambda freed: messages.Unloaded(id=key, model=name, freed_bytes=freed),
                )
            case messages.Drain():
                self._answer(key, ask(mail.DrainWanted()), lambda _: messages.Drained(id=key))
            case _:
                assert_never(request)

    def _answer(self, key: str, asked: Coroutine[Any, Any, R], event: Callable[[R], Event]) -> None:
        ref = self.ref

        def failed(error: Exception) -> None:
            known = error if isinstance(error, KvdError) else InternalError(str(error))
            ref.tell(mail.Deliver(messages.Error(id=key, error=known.info())))

        self.pipe(asked, lambda result: ref.tell(mail.Deliver(event(result))), failed)

    def _fail(self, key: str, error: KvdError) -> None:
        self._send(messages.Error(id=key, error=error.info()))

    def _send(self, event: Event) -> None:
        if event.id not in self._session.open:
            return  # progress of a load that was answered in the meantime
        if messages.is_last(event):
            self._rids.pop(event.id, None)
        self._write(self._session.send(event))

    def _write(self, data: bytes) -> None:
        if self._socket is None or self._stopping:
            return
        self._socket.write(data)
        if self._socket.backlog() > self._services.slow_reader_bytes:
            error = SlowReader(
                "the client did not read its events; its requests were cancelled",
                limit_bytes=self._services.slow_reader_bytes,
            )
            self._say_last(error)
            self.stop()

    def _say_last(self, error: KvdError) -> None:
        """Say of the connection why it ends."""
        if self._socket is not None:
            self._socket.write(self._session.refuse(messages.Error(id="", error=error.info())))


def _tokens(key: str, told: wire.Tokenized) -> Event:
    if told.error is not None:
        return messages.Error(id=key, error=told.error)
    return messages.Tokenized(id=key, count=told.count, tokens=told.tokens, texts=told.texts)
