"""A whole `System` on fake ports, with clients that exchange bytes with it.

At the end of `world`, every invariant is checked: the metrics add up, every request has received
its last event, and no process is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

from actors.client import Identity
from actors.ports import EstimateModel, Notice, Notify
from actors.prefix_store import SegmentDisk
from actors.saved_requests import SavedRequests
from actors.status import KnownModel
from actors.system import Connection, Settings, System
from kvd.metrics.counters import KEPT_AFTER_UNLOAD
from kvd.metrics.exposition import Exposition
from protocol import messages
from protocol.errors import from_info
from protocol.messages import Event, Request, is_last
from protocol.session import ClientSession
from tests.sim.fakes import FakeConfiguration, FakeMemory, FakeSpawn, Script, no_files
from tests.sim.loop import until

R = TypeVar("R")


class SimClient:
    """A client without a socket."""

    def __init__(self, system: System) -> None:
        self.session = ClientSession()
        self.events: dict[str, list[Event]] = {}
        self.closed = False
        self.unread = 0
        self.reads = True
        self._ids = count(1)
        self.connection: Connection = system.connect(
            write=self._written, close=self._close, backlog=lambda: self.unread
        )

    def _written(self, data: bytes) -> None:
        assert not self.closed, "written after close"
        if not self.reads:
            self.unread += len(data)
        for event in self.session.receive(data):
            self.events.setdefault(event.id, []).append(event)

    def _close(self) -> None:
        self.closed = True

    def disconnect(self) -> None:
        self.closed = True
        self.connection.closed()

    def start(self, kind: type[Request], **fields: Any) -> str:
        """Send a request and return its id."""
        key = f"q{next(self._ids)}"
        self.events[key] = []
        self.connection.receive(self.session.request(kind(id=key, **fields)))
        return key

    def generate(self, model: str = "demo", prompt: str = "hello", **fields: Any) -> str:
        return self.start(messages.Generate, model=model, prompt=prompt, **fields)

    async def end(self, key: str, limit_s: float = 5000.0) -> Event:
        """Wait for the last event of a request."""
        await until(lambda: self.events[key] and is_last(self.events[key][-1]), limit_s)
        return self.events[key][-1]

    async def ask(self, kind: type[Request], **fields: Any) -> Any:
        """Send a request and return its last event; raise an exception if that is an error."""
        event = await self.end(self.start(kind, **fields))
        if isinstance(event, messages.Error):
            raise from_info(event.error)
        return event

    def tokens(self, key: str) -> list[int]:
        """Return the tokens so far; check that none is missing."""
        found: list[int] = []
        for event in self.events[key]:
            if isinstance(event, messages.Tokens):
                assert event.index == len(found), "a gap in the stream"
                found += event.tokens
        return found

    def count(self, key: str) -> int:
        return len(self.tokens(key))


class World:
    """A system with its fakes and clients."""

    def __init__(
        self,
        scripts: dict[str, list[Script]],
        budget: int,
        settings: Settings,
        saved_requests: SavedRequests | None = None,
        known: dict[str, KnownModel] | None = None,
        estimate_model: EstimateModel = no_files,
        spawn: Any = None,
        notify: Notify | None = None,
        segment_disk: SegmentDisk | None = None,
        devices: int = 1,
        host_bytes: int | None = None,
    ) -> None:
        self.spawn = FakeSpawn(scripts) if spawn is None else spawn
        self.memory = FakeMemory(separate=host_bytes is not None)
        self.notices: list[Notice] = []
        self.clients: list[SimClient] = []
        self.metrics = Exposition(lambda: self.system, run_in_thread=_call_directly)
        seeds = count(7)
        self.system = System(
            self.spawn,
            self.memory,
            budget_bytes=budget,
            devices=devices,
            host_bytes=host_bytes,
            identity=Identity(version="0", home="/home/kvd", pid=1),
            settings=settings,
            known=known,
            may_load=lambda _source: True,
            estimate_model=estimate_model,
            draw_seed=lambda: next(seeds),
            notify=notify or self.notices.append,
            saved_requests=saved_requests,
            observe=self.metrics.counters,
            metrics=self.metrics.text,
            segment_disk=segment_disk,
        )
        self.system.prefix_store.clock = lambda: asyncio.get_running_loop().time()
        self.system.configuration = FakeConfiguration()

    def client(self) -> SimClient:
        client = SimClient(self.system)
        self.clients.append(client)
        return client

    def model(self, name: str = "demo") -> Any:
        return next((m for m in self.system.status().models if m.name == name), None)

    def state(self, name: str = "demo") -> str | None:
        model = self.model(name)
        return model.state if model is not None else None

    def notices_of(self, event: str) -> list[Notice]:
        return [notice for notice in self.notices if notice.event == event]

    def check(self) -> None:
        """Check all invariants."""
        self.system.check()
        self._check_metrics()

    def _check_metrics(self) -> None:
        """Check that every request that arrived is counted as ended or open."""
        models = self.metrics.counters.models.values()
        received = sum(it.received for it in models)
        over = sum(sum(it.finished.values()) + sum(it.failed.values()) for it in models)
        assert received - over == sum(self.system.count_requests().values()), (
            "requests counted wrongly"
        )

    def check_tokens(self) -> None:
        """Check after the end that clients received as many tokens as were counted."""
        models = self.metrics.counters.models
        if len(models) > KEPT_AFTER_UNLOAD:
            return  # the counters forgot some removed models
        counted = sum(it.generated for it in models.values())
        received = sum(
            len(event.tokens)
            for client in self.clients
            for events in client.events.values()
            for event in events
            if isinstance(event, messages.Tokens)
        )
        others = next(self.system._numbers) - 1 - len(self.clients)
        assert received <= counted, "tokens that were not counted"
        if not others and not any(client.closed for client in self.clients):
            assert received == counted, "tokens counted wrongly"


async def _call_directly(call: Callable[[], R]) -> R:
    """Call a function on the simulated loop, which has no threads."""
    return call()


@asynccontextmanager
async def world(
    scripts: dict[str, list[Script]] | None = None,
    *,
    budget: int = 1000,
    settings: Settings | None = None,
    load: tuple[str, ...] = ("demo",),
    known: dict[str, KnownModel] | None = None,
    estimate_model: EstimateModel = no_files,
    faults: bool = False,
    saved_requests: SavedRequests | None = None,
    segment_disk: SegmentDisk | None = None,
    devices: int = 1,
    host_bytes: int | None = None,
) -> AsyncIterator[World]:
    """Start a world with these models loaded. ``faults``: actors may fail.

    ``host_bytes``: budget of the host's memory, if devices have memory of their own.
    """
    it = World(
        scripts or {},
        budget,
        settings or Settings(),
        saved_requests,
        known,
        estimate_model,
        segment_disk=segment_disk,
        devices=devices,
        host_bytes=host_bytes,
    )
    await it.system.start()
    await asyncio.gather(*(it.system.load(name) for name in load))
    yield it
    it.check()
    assert faults or not it.notices_of("actor_failed"), it.notices_of("actor_failed")
    if not it.system.finished.done():
        await it.system.stop(force=True)
    await asyncio.sleep(0.1)
    assert not it.spawn.alive(), "a process is left"
    if saved_requests is None and not faults:
        it.check_tokens()
    for client in it.clients:
        for key, events in client.events.items():
            last = [event for event in events if is_last(event)]
            assert len(last) <= 1, f"{key} ended twice"
            assert client.closed or last, f"{key} never ended"
