"""The whole daemon without its sockets: what the composition root builds and feeds.

Knows nothing of files, sockets, processes or MLX: those come in through `actors.ports`. All of
it runs on one event loop, and every method must be called on that loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from actors.ports import Notice, Notify, ReadMemory, SpawnWorker
from protocol.types import DaemonStatus, KVSpec, ModelStatus


class SystemFault(Exception):  # noqa: N818 - a fault of the house, not an error of a caller
    """A core actor could not be restarted: the daemon must exit with a non-zero status."""


@dataclass(frozen=True)
class Identity:
    """What `hello` and `status` say about the daemon."""

    version: str
    home: str
    pid: int


@dataclass(frozen=True)
class Settings:
    """What the configuration may change; the defaults are what the daemon runs with."""

    max_rows: int = 32
    """The most rows in one decode step of a model."""
    prefill_chunk: int = 256
    attention_scratch: int = 256 * 1024 * 1024
    max_queue: int = 1024
    """Requests that one model may hold, queued or running; beyond it they are `overloaded`."""
    slow_reader_bytes: int = 4 * 1024 * 1024
    """Unread events that a connection may have before it is closed with `slow_reader`."""


def silent(_: Notice) -> None:
    """Drop a notice."""


class Connection:
    """One client's end of the system; made by `System.connect`."""

    def receive(self, data: bytes) -> None:
        """Take bytes that the client sent. Never raises for what the client did."""
        raise NotImplementedError

    def closed(self) -> None:
        """Say that the client is gone (EOF or reset): its generate requests are cancelled.

        Idempotent; also expected after the system itself asked for `close`.
        """
        raise NotImplementedError


class System:
    """Several models under one budget, as actors.

    Life: ``System(...)``, ``await start()``, then `connect` for each client and `load` for each
    model of the configuration; at the end ``await stop()``; `finished` says when it is all over.
    """

    finished: asyncio.Future[None]
    """Done when everything has stopped: a result after `stop` or a client's ``shutdown`` (the
    answer ``bye`` is written by then), `SystemFault` as exception when a core actor was lost
    (workers have been killed by then). Created by `start`. Shield it if you wait on it."""

    def __init__(
        self,
        spawn: SpawnWorker,
        memory: ReadMemory,
        *,
        budget_bytes: int,
        identity: Identity,
        settings: Settings | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        notify: Notify = silent,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Start the core actors; returns when they run."""
        raise NotImplementedError

    def connect(
        self,
        *,
        write: Callable[[bytes], None],
        close: Callable[[], None],
        backlog: Callable[[], int],
    ) -> Connection:
        """Take a new client.

        `write` buffers bytes for it, whole lines, and must never block or raise; `close` ends
        the connection after what is buffered went out (bounded: a client that does not read must
        be cut off after a second or two); `backlog` tells the bytes buffered and not yet taken by
        the kernel. None of them is called after `Connection.closed` returned.
        """
        raise NotImplementedError

    async def load(
        self, model: str, *, alias: str | None = None, kv: KVSpec | None = None
    ) -> ModelStatus:
        """Load a model and wait until it answers; raises KvdError with the reason if it never will.

        A second load of the same model under the same name joins the first.
        """
        raise NotImplementedError

    def status(self) -> DaemonStatus:
        """Collect the newest snapshots; never waits for anyone."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Take no new work; return when nothing runs any more. Models stay loaded."""
        raise NotImplementedError

    async def stop(self, *, force: bool = False) -> None:
        """Drain, stop all workers, then the actors; returns when `finished` is done.

        With `force` what runs is ended with `draining` errors. A second call with `force` while
        the first still drains is how a second signal hurries it.
        """
        raise NotImplementedError
