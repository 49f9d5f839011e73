"""The whole daemon without its sockets: what the composition root builds and feeds.

Knows nothing of files, sockets, processes or MLX: those come in through `actors.ports`. All of
it runs on one event loop, and every method must be called on that loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from actors import mail
from actors.caller import Call, Caller
from actors.client import Client, Services, Socket
from actors.event_log import EventLog
from actors.explain import Explainer
from actors.governor import GovernorActor, GovernorActorState
from actors.known_models import KnownModel, KnownModels
from actors.machines.admission import Admission
from actors.machines.governor import Governor
from actors.machines.ledger import Ledger
from actors.machines.lifecycle import Lifecycle
from actors.machines.watchdog import WatchdogTimeouts
from actors.model_registry import ModelRegistry, RegistryState
from actors.ports import Notice, ignore_observation, no_metrics
from actors.readings import ReadingsActor, ReadingsState
from actors.router import Router, RouterState
from actors.runtime.actor import MailboxFull
from actors.runtime.supervision import Child, SupervisionTree
from actors.saved_requests import SavedRequests
from actors.status import StatusTable
from actors.time_slices import TimeSlicesActor, TimeSlicesState
from actors.tokenizing import TokenizeRequests
from actors.worker import Worker, WorkerServices, WorkerState
from protocol.errors import InvalidRequest, UnknownModel
from protocol.types import DaemonStatus, KVSpec, ModelStatus
from protocol.worker import LoadModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.mail import ClientMail, RegistryMail, WorkerMail
    from actors.ports import (
        Configuration,
        EstimateModel,
        MemoryReader,
        Metrics,
        Notify,
        Observe,
        SpawnWorker,
    )
    from actors.request_state import Stage
    from actors.runtime.actor import Actor, Ref
    from protocol.costs import Estimate
    from protocol.messages import Event, Generate
    from protocol.policy import ModelPolicy
    from protocol.settings import Changed, Setting
    from protocol.types import TimeSlicesMode


class SystemFault(Exception):
    """A core actor could not be restarted: the daemon must exit with a non-zero status."""


@dataclass(frozen=True)
class Identity:
    """What `hello` and `status` say about the daemon."""

    version: str
    home: str
    pid: int
    http: tuple[str, ...] = ()
    """Where it answers HTTP."""


@dataclass(frozen=True)
class Settings:
    """What the configuration may change; the defaults are what the daemon runs with."""

    max_rows: int = 32
    """The most rows in one decode step of a model."""
    prefill_chunk: int = 256
    attention_scratch: int = 256 * 1024 * 1024
    time_slices: TimeSlicesMode = "auto"
    """Whether models that compute at once take turns."""
    max_queue: int = 1024
    """Requests that one model may hold, queued or running; beyond it they are `overloaded`."""
    max_queue_bytes: int = 64 * 1024 * 1024
    """Memory that those may take in the daemon; the prompts are most of it."""
    swap_folder: str | None = None
    """Where rows are parked, each model's in a folder of its own; None: nowhere."""
    swap_bytes: int = 0
    """The most of one model's."""
    slow_reader_bytes: int = 4 * 1024 * 1024
    """Unread events that a connection may have before it is closed with `slow_reader`."""
    patience: WatchdogTimeouts = field(default_factory=WatchdogTimeouts)
    """How long a worker may be silent in each phase before it is ended."""


@dataclass
class ConfigReloadStatus:
    """What came of the last reload of the configuration, for `status`."""

    pending: list[str] = field(default_factory=list)
    error: str | None = None
    reloads: int = 0


SETTLE_S = 1.0
"""For the last answers to reach their clients; they are on their way already."""


def silent(_: Notice) -> None:
    """Drop a notice."""


async def no_files(source: str, kv: KVSpec) -> Estimate:  # noqa: ARG001 - the form of `Reckon`
    """Know no model that is not loaded."""
    raise UnknownModel(f"{source!r} is not loaded, and nothing is known of it", source=source)


class NoConfiguration:
    """Of a system that has no configuration."""

    @property
    def table(self) -> list[Setting]:
        """Nothing."""
        return []

    async def change(self, values: Mapping[str, Any]) -> list[Changed]:
        """Refuse."""
        raise InvalidRequest(f"there is no setting {next(iter(values))!r}", field="settings")

    async def budget_changed(self, total_bytes: int) -> None:
        """Note nothing."""


class Connection:
    """One client's end of the system; made by `System.connect`."""

    def __init__(self, client: Ref[ClientMail], hang_up: Callable[[], None]) -> None:
        self._client = client
        self._hang_up = hang_up

    def receive(self, data: bytes) -> None:
        """Take bytes that the client sent. Never raises for what the client did."""
        try:
            self._client.tell(mail.Received(data))
        except MailboxFull:
            self._hang_up()

    def closed(self) -> None:
        """Say that the client is gone (EOF or reset): its generate requests are cancelled.

        Idempotent; also expected after the system itself asked for `close`.
        """
        self._client.tell(mail.Closed(), beyond_limit=True)


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
        memory: MemoryReader,
        *,
        budget_bytes: int,
        identity: Identity,
        settings: Settings | None = None,
        known: Mapping[str, KnownModel] | None = None,
        estimate_model: EstimateModel = no_files,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        notify: Notify = silent,
        archive: SavedRequests | None = None,
        observe: Observe = ignore_observation,
        metrics: Metrics = no_metrics,
    ) -> None:
        self._spawn = spawn
        self._memory = memory
        self._identity = identity
        self._settings = settings or Settings()
        self.config = ConfigReloadStatus()
        self.configuration: Configuration = NoConfiguration()
        """What clients may see and change of it; set before `start`."""
        self._notify = notify
        self._board = StatusTable()
        self._events = EventLog(notify, observe)
        self._governor = GovernorActorState(Governor(Ledger(budget_bytes)), self._events)
        self._catalogue = KnownModels(dict(known or {}))
        self._reckon = estimate_model
        self._board.policies = self._catalogue.policies
        desk = Admission(self._settings.max_queue, self._settings.max_queue_bytes)
        self._archive = archive or SavedRequests()
        self._observe, self._metrics = observe, metrics
        self._office = RouterState(
            desk, draw_seed, self._board, notify, self._archive, observe=observe
        )
        self._time_slices = TimeSlicesState()
        self._tree = SupervisionTree(self._on_fault, notify)
        self._numbers = count(1)
        self._ending: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None

    async def start(self) -> None:
        """Start the core actors; returns when they run."""
        loop = asyncio.get_running_loop()
        self.finished = loop.create_future()
        self._started_at = loop.time()
        tree = self._tree
        governor = tree.start(Child("governor", lambda: GovernorActor(self._governor)))
        router = tree.start(Child("router", lambda: Router(self._office)))
        self._house = RegistryState(
            board=self._board,
            start_worker=self._start_worker,
            stop_worker=tree.stop,
            router=router,
            governor=governor,
            on_empty=self._end,
            catalogue=self._catalogue,
        )
        self._supervisor: Ref[RegistryMail] = tree.start(
            Child("supervisor", lambda: ModelRegistry(self._house))
        )
        self._readings = ReadingsState(self._memory, self._board, governor)
        tree.start(Child("readings", lambda: ReadingsActor(self._readings)))
        supervisor = self._supervisor
        self._office.events = self._events
        self._office.summon = lambda model: supervisor.tell(mail.EnsureLoaded(model))
        self._governor.evict = lambda model, requeue: supervisor.tell(
            mail.EvictRequest(model, requeue)
        )
        self._governor.hold = lambda model, held: router.tell(mail.ModelHeld(model, held))
        self._around = WorkerServices(
            spawn=self._spawn,
            router=router,
            time_slices=tree.start(
                Child("time_slices", lambda: TimeSlicesActor(self._time_slices))
            ),
            governor=governor,
            supervisor=self._supervisor,
            board=self._board,
            notify=self._notify,
            observe=self._observe,
        )
        self._services = Services(
            router=router,
            supervisor=self._supervisor,
            governor=governor,
            events=self._events,
            texts=TokenizeRequests(self._supervisor),
            explain=Explainer(self._board, self._catalogue, self._governor.machine, self._reckon),
            configuration=self.configuration,
            status=self.status,
            metrics=self._metrics,
            run=f"{secrets.token_hex(4)}-" if self._archive.records is not None else "",
            version=self._identity.version,
            pid=self._identity.pid,
            home=self._identity.home,
            slow_reader_bytes=self._settings.slow_reader_bytes,
        )

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
        the kernel. None of them is called once the system has handled `Connection.closed`, which
        it does on the loop's next turn; until then they must be harmless.
        """
        number = next(self._numbers)
        socket = Socket(write, close, backlog)
        child = Child(
            f"client-{number}", lambda: Client(number, socket, self._services), "temporary"
        )
        client = self._tree.start(child)
        return Connection(client, lambda: self._tree.stop(client))

    def generate(self, request: Generate, deliver: Callable[[Event], None]) -> Call:
        """Run a request of somebody in this process.

        Its events go to `deliver`, on the event loop and never before this returns. The last one
        is always told, unless `Call.cancel` comes first: then nothing more is. `deliver` must not
        block; whoever reads slowly bounds what is not read, and cancels.
        """
        number = next(self._numbers)
        rid = f"{self._services.run}{number}.1"
        child = Child(
            f"caller-{number}",
            lambda: Caller(rid, request, deliver, self._services.router),
            "temporary",
        )
        return Call(self._tree.start(child))

    async def load(
        self,
        model: str,
        *,
        alias: str | None = None,
        kv: KVSpec | None = None,
        policy: ModelPolicy | None = None,
    ) -> ModelStatus:
        """Load a model and wait until it answers; raises KvdError with the reason if it never will.

        A second load of the same model under the same name joins the first.
        """
        return await self._supervisor.ask(mail.LoadWanted(model, alias, kv or KVSpec(), policy))

    async def set_budget(self, total_bytes: int) -> None:
        """Let so much be granted in all from now on; what is granted above it is worked off."""
        await self._services.governor.ask(mail.BudgetWanted(total_bytes))

    async def list_model(self, name: str, known: KnownModel, policy: Mapping[str, Any]) -> bool:
        """Know a model of the configuration, and set these fields of its policy.

        Return whether it is loaded from now on as `known` says; not while it is loaded otherwise.
        """
        return await self._supervisor.ask(mail.ListWanted(name, known, policy))

    async def unlist_model(self, name: str) -> None:
        """Forget that a model is in the configuration; if it is loaded it stays so."""
        await self._supervisor.ask(mail.UnlistWanted(name))

    def status(self) -> DaemonStatus:
        """Collect the newest snapshots; never waits for anyone."""
        identity, governor = self._identity, self._governor
        return DaemonStatus(
            version=identity.version,
            pid=identity.pid,
            uptime_s=asyncio.get_running_loop().time() - self._started_at,
            home=identity.home,
            state="draining" if self._house.draining else "serving",
            budget_bytes=governor.budget_bytes,
            granted_bytes=governor.granted_bytes,
            violations=governor.violations,
            footprint_bytes=self._memory.footprint(identity.pid),
            host=self._memory.host(),
            models=self._board.all(),
            unloaded=sorted(set(self._catalogue.models) - set(self._board.models)),
            config_pending=self.config.pending,
            config_error=self.config.error,
            config_reloads=self.config.reloads,
            http=list(identity.http),
        )

    def knows(self, model: str) -> bool:
        """Return whether requests may name this model, loaded or not."""
        return model in self._catalogue.models or model in self._board.models

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._office.jobs)

    def count_requests(self) -> Counter[tuple[str, Stage]]:
        """Count the requests of each model that wait, run and rest."""
        requests, jobs = self._office.machine.requests, self._office.jobs
        return Counter((requests[rid].model, job.stage) for rid, job in jobs.items())

    async def drain(self) -> None:
        """Take no new work; return when nothing runs any more. Models stay loaded."""
        await self._supervisor.ask(mail.DrainWanted())

    async def stop(self, *, force: bool = False) -> None:
        """Drain, stop all workers, then the actors; returns when `finished` is done.

        With `force` what runs is ended with `draining` errors. A second call with `force` while
        the first still drains is how a second signal hurries it.
        """
        self._supervisor.tell(mail.ShutdownWanted(force))
        await asyncio.wait([self.finished])

    def check(self) -> None:
        """Raise AssertionError if any actor contradicts itself; for tests and debugging."""
        for actor in self._tree.actors():
            actor.check()

    def actors(self) -> list[Actor[Any]]:
        """Return the actors that live now."""
        return self._tree.actors()

    def _start_worker(self, name: str, known: KnownModel) -> Ref[WorkerMail]:
        load = LoadModel(
            source=known.source,
            kv=known.kv,
            max_context=known.policy.max_context,
            max_rows=self._settings.max_rows,
            prefill_chunk=self._settings.prefill_chunk,
            attention_scratch=self._settings.attention_scratch,
            time_slices=self._settings.time_slices,
            swap_folder=self._swap_folder(name),
            swap_bytes=self._settings.swap_bytes,
        )
        machine = Lifecycle(name, self._settings.patience)
        berth = WorkerState(name, load, self._around, machine, weight=known.policy.weight)
        # Each failure costs the process and counts in its own restart budget; ten in a minute
        # are more than that budget lets through.
        child = Child(f"worker-{name}", lambda: Worker(berth), intensity=10)
        return self._tree.start(child)

    def _swap_folder(self, name: str) -> str | None:
        """Return a model's own folder; names may hold what paths may not."""
        folder = self._settings.swap_folder
        return folder and f"{folder}/{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    def _on_fault(self, error: BaseException) -> None:
        if self._fault is None:
            self._fault = error
            self._end()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        if self._fault is None:
            await self._tree.settle(SETTLE_S)
        await self._tree.stop_all()
        if self._fault is None:
            self.finished.set_result(None)
            return
        fault = SystemFault(f"a core actor could not be restarted: {self._fault}")
        fault.__cause__ = self._fault
        self.finished.set_exception(fault)
