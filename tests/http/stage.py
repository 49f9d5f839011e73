"""The real server on a free port, in this process, with a scripted daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvd.config.http import HttpSettings
from kvd.host.home import Home
from kvd.http.backend import Metrics
from kvd.http.listeners import open_listeners
from kvd.http.server import Server
from protocol import messages
from protocol.errors import KvdError
from protocol.messages import Event, Generate, Tokenize, Tokenized
from protocol.types import DaemonStatus, HostMemory, ModelStatus, Usage

Script = Callable[[Generate], Sequence[Event]]


def says(*texts: str) -> Script:
    """Return a script that accepts a request, sends these texts as one token each, and ends."""

    def script(request: Generate) -> Sequence[Event]:
        spoken = [
            messages.Tokens(id="http", index=i, tokens=[i], text=text)
            for i, text in enumerate(texts)
        ]
        usage = Usage(prompt_tokens=3, completion_tokens=len(texts), levels=[0])
        seed = request.sampling.seed or 7
        return [
            messages.Accepted(id="http", prompt_tokens=3, seed=seed),
            *spoken,
            messages.Done(id="http", reason="stop", usage=usage),
        ]

    return script


def fails(error: KvdError, *before: Event) -> Script:
    return lambda _: [*before, messages.Error(id="http", error=error.info())]


def hangs(*before: Event) -> Script:
    return lambda _: before


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.005)


@dataclass
class Call:
    request: Generate
    deliver: Callable[[Event], None]
    cancelled: int = 0

    def cancel(self) -> None:
        self.cancelled += 1


@dataclass
class Scripted:
    """A daemon that answers each request with the next script; the last script repeats."""

    scripts: list[Script] = field(default_factory=lambda: [says("Hello", " there")])
    calls: list[Call] = field(default_factory=list)
    models: list[ModelStatus] = field(
        default_factory=lambda: [ModelStatus(name="m", source="fake:", state="ready")]
    )
    unloaded: list[str] = field(default_factory=list)
    texts: list[Tokenize] = field(default_factory=list)
    errors: list[KvdError] = field(default_factory=list)
    """Errors of the next texts to tokenize, one each."""
    state: str = "serving"
    kept: dict[str, float] = field(default_factory=dict)
    """Seconds by model, from `keep_loaded`."""

    def generate(self, request: Generate, deliver: Callable[[Event], None]) -> Call:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        call = Call(request, deliver)
        self.calls.append(call)
        for event in script(request):
            asyncio.get_running_loop().call_soon(deliver, event)
        return call

    def keep_loaded(self, model: str, seconds: float) -> None:
        self.kept[model] = seconds

    async def tokenize(self, request: Tokenize) -> Tokenized:
        """Count characters as tokens."""
        self.texts.append(request)
        if self.errors:
            raise self.errors.pop(0)
        texts = [request.prompt or "", *(one.content for one in request.messages or [])]
        return Tokenized(id=request.id, count=sum(map(len, texts)))

    def status(self) -> DaemonStatus:
        return DaemonStatus(
            version="0",
            pid=1,
            uptime_s=1.0,
            home="/",
            state=self.state,
            budget_bytes=0,
            granted_bytes=0,
            footprint_bytes=0,
            host=HostMemory(total=0, available=0),
            models=self.models,
            unloaded=self.unloaded,
        )

    async def settled(self) -> None:
        """Wait until the server has cancelled every call. It also cancels calls that have ended."""
        await until(lambda: self.calls and all(call.cancelled for call in self.calls))


@dataclass(frozen=True)
class Stage:
    backend: Scripted
    url: str
    """The TCP address."""
    socket: str
    port: int
    server: Server


@asynccontextmanager
async def serving(
    home: Home,
    *scripts: Script,
    backend: Scripted | None = None,
    control: Scripted | None = None,
    metrics: Metrics | None = None,
    starting: bool = False,
    unread_limit: int = 4 * 2**20,
    uid_of: Callable[..., int] | None = None,
    **settings,
) -> AsyncIterator[Stage]:
    home.create()
    backend = control or backend or (Scripted(list(scripts)) if scripts else Scripted())
    http = HttpSettings(**{"port": 0} | settings)
    listeners = open_listeners(home, http).listeners
    server = Server(
        backend,
        http,
        listeners,
        unread_limit=unread_limit,
        control=control,
        metrics=metrics,
        starting=lambda: starting,
        **({"uid_of": uid_of} if uid_of else {}),
    )
    await server.start()
    try:
        url = listeners[0].address
        yield Stage(backend, url, str(home.http_socket), int(url.rpartition(":")[2]), server)
    finally:
        await server.close()
        for listener in listeners:
            listener.close()
