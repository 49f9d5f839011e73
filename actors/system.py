"""The daemon's actors as one object, which `kvd.daemon` constructs and connects to sockets.

Files, sockets, processes and MLX are behind `actors.ports`. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from actors import mail, ports
from actors.cache_outcomes import CacheOutcomes
from actors.caller import Call, Caller
from actors.client import Client, ClientServices, Identity, Socket
from actors.event_log import EventLog
from actors.explain import Explainer
from actors.governor import GovernorActor, GovernorActorState
from actors.machines import admission_events
from actors.machines.admission import Admission
from actors.machines.governors import Governors
from actors.machines.lifecycle import Lifecycle
from actors.machines.prefix_store_events import LimitsChanged, StoreLimits
from actors.machines.watchdog import WatchdogTimeouts
from actors.model_registry import ModelRegistry
from actors.prefix_store import NoDisk, PrefixStoreActor, PrefixStoreState, SegmentDisk
from actors.readings import ReadingsActor, ReadingsState
from actors.registry_state import RegistryState
from actors.request_log import open_records
from actors.request_state import Stage
from actors.router import Router, RouterState
from actors.runtime.actor import MailboxFull, Ref
from actors.runtime.supervision import Child, SupervisionTree
from actors.saved_requests import SavedRequests
from actors.status import KnownModel, StatusTable
from actors.time_slices import TimeSlicesActor, TimeSlicesState
from actors.tokenizing import TokenizeRequests
from actors.worker import Worker, WorkerServices, WorkerState
from protocol.embedding import Embed, EmbeddingsMode
from protocol.kv import BitsMode, KVSpec
from protocol.messages import Event, EventRecord, Generate, Tokenize, Tokenized
from protocol.model_source import is_source
from protocol.policy import PolicyChange
from protocol.request_record import RequestRecord
from protocol.types import DaemonStatus, HostMemory, ModelStatus, Problem, TimeSlicesMode
from protocol.worker import LoadModel

PREFIX_PARTS = 4
"""The prefix cache of a model may take one of so many parts of the budget, unless it is set."""


class SystemFault(Exception):
    """A core actor could not be restarted: the daemon must exit with a non-zero status."""


@dataclass(frozen=True)
class Settings:
    """Settings from the configuration; the fields of `LoadModel` are described there."""

    max_rows: int = 32
    prefill_chunk: int = 256
    lone_chunk: int | None = None
    attention_scratch: int = 256 * 1024 * 1024
    time_slices: TimeSlicesMode = "auto"
    embeddings: EmbeddingsMode = "auto"
    bits_by_layer: BitsMode = "auto"
    max_queue: int = 1024
    """Maximum requests per model, queued and running; more end with ``overloaded``."""
    max_queue_bytes: int = 64 * 1024 * 1024
    """Maximum bytes that those requests take in the daemon, mostly for prompts."""
    swap_folder: str | None = None
    """Folder for preempted rows, with one subfolder per model; None disables swapping."""
    swap_bytes: int = 0
    segments_folder: str = ""
    key_file: str | None = None
    prefix_store: StoreLimits = field(default_factory=StoreLimits)
    slow_reader_bytes: int = 4 * 1024 * 1024
    """Unread bytes after which a connection is closed with ``slow_reader``."""
    patience: WatchdogTimeouts = field(default_factory=WatchdogTimeouts)


@dataclass
class ConfigReloadStatus:
    """Result of the last reload of the configuration, for ``status``."""

    pending: list[str] = field(default_factory=list)
    """Keys whose new values wait for a restart."""
    error: str | None = None
    reloads: int = 0


PIPE_TIMEOUT_S = 1.0
"""Seconds for the last answers, which are on their way already, to reach their clients."""


class Connection:
    """One client's end of the system; made by `System.connect`."""

    def __init__(self, client: Ref[mail.ClientMail], disconnect: Callable[[], None]) -> None:
        self._client = client
        self._disconnect = disconnect

    def receive(self, data: bytes) -> None:
        """Handle bytes from the client. Never raises, whatever the client sends."""
        try:
            self._client.tell(mail.BytesReceived(data))
        except MailboxFull:
            self._disconnect()

    def closed(self) -> None:
        """Handle the end of the connection (EOF or reset); cancel its ``generate`` requests.

        Idempotent. Call it also after the system itself called `close`.
        """
        self._client.tell(mail.ConnectionClosed(), beyond_limit=True)


class System:
    """Several models under one memory budget, as actors.

    Construct it, ``await start()``, then `connect` each client and `load` each configured model;
    at the end ``await stop()``. `finished` is done when everything has stopped.
    """

    configuration: ports.Configuration
    """Port for clients that read and change the configuration; set it before `start`."""
    finished: asyncio.Future[None]
    """Created by `start`, and done when everything has stopped. After `stop` or ``shutdown`` it has
    a result, and a client has its reply. After the loss of a core actor it has the exception
    `SystemFault`, and the workers are killed. Shield it when you await it."""

    def __init__(
        self,
        spawn: ports.SpawnWorker,
        memory: ports.MemoryReader,
        *,
        budget_bytes: int,
        devices: int = 1,
        host_bytes: int | None = None,
        identity: Identity,
        settings: Settings,
        known: Mapping[str, KnownModel] | None = None,
        find_model: Callable[[str], str | None] = lambda _name: None,
        may_load: Callable[[str], bool] = is_source,
        estimate_model: ports.EstimateModel,
        find_problems: ports.FindProblems = lambda _budget_bytes, _host: [],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        notify: ports.Notify,
        saved_requests: SavedRequests | None = None,
        observe: ports.Observe,
        metrics: ports.Metrics,
        segment_disk: SegmentDisk | None = None,
    ) -> None:
        self._spawn = spawn
        self._memory = memory
        self._identity, self._settings = identity, settings
        self.reload_status = ConfigReloadStatus()
        self._notify, self._observe, self._metrics = notify, observe, metrics
        self._estimate_model, self._find_problems = estimate_model, find_problems
        self._statuses = StatusTable(dict(known or {}), find_model=find_model, may_load=may_load)
        self._statuses.devices = devices
        self.events = EventLog(notify, observe)
        self._outcomes = CacheOutcomes(self.events)
        self._governors = Governors.create(budget_bytes, devices, host_bytes)
        self._governor = GovernorActorState(self._governors, self.events)
        self._router = RouterState(
            Admission(self._settings.max_queue, self._settings.max_queue_bytes),
            draw_seed,
            self._statuses,
            notify,
            saved_requests or SavedRequests(),
            self.events,
            observe,
            self._outcomes,
        )
        self._statuses.expires_in = self._expires_in
        self._time_slices = TimeSlicesState(devices)
        self.prefix_store = PrefixStoreState(
            notify,
            self.events,
            observe,
            segment_disk or NoDisk(),
            self._settings.segments_folder,
            encrypted=self._settings.key_file is not None,
        )
        self._tree = SupervisionTree(self._on_fault, notify)
        self._numbers = count(1)
        self._ending: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None

    async def start(self) -> None:
        """Start the core actors; return when they run."""
        loop = asyncio.get_running_loop()
        self.finished = loop.create_future()
        self._started_at = loop.time()
        tree = self._tree
        governor = tree.start(Child("governor", lambda: GovernorActor(self._governor)))
        router = tree.start(Child("router", lambda: Router(self._router)))
        self._registry = RegistryState(
            statuses=self._statuses,
            start_worker=self._start_worker,
            stop_worker=tree.stop,
            router=router,
            governor=governor,
            on_empty=self._end,
        )
        registry = tree.start(Child("registry", lambda: ModelRegistry(self._registry)))
        self._registry_ref: Ref[mail.RegistryMail] = registry
        self._readings = ReadingsState(self._memory, self._statuses, governor)
        tree.start(Child("readings", lambda: ReadingsActor(self._readings)))
        time_slices = tree.start(Child("time_slices", lambda: TimeSlicesActor(self._time_slices)))
        self._start_prefix_store()
        self._router.request_load = lambda model: registry.tell(mail.EnsureLoaded(model))
        self._router.keep_loaded = self.keep_loaded
        self._governor.evict = lambda model, requeue: registry.tell(mail.EvictModel(model, requeue))
        self._governor.end = lambda model, order: registry.tell(mail.EndWorker(model, order))
        self._governor.hold = lambda model, held: router.tell(
            mail.AdmissionEvent(admission_events.ModelHeld(model, held))
        )
        self._worker_services = WorkerServices(
            spawn=self._spawn,
            router=router,
            time_slices=time_slices,
            governor=governor,
            registry=registry,
            prefix_store=self._prefix_store_ref,
            statuses=self._statuses,
            notify=self._notify,
            observe=self._observe,
        )
        journaled = self._router.saved.journal is not None
        self._client_services = ClientServices(
            router=router,
            registry=registry,
            governor=governor,
            events=self.events,
            outcomes=self._outcomes,
            tokenizing=TokenizeRequests(registry),
            explain=self._explainer(),
            configuration=self.configuration,
            status=self.status,
            problems=self.problems,
            prefix_store=self.prefix_store,
            prefix_store_ref=self._prefix_store_ref,
            metrics=self._metrics,
            rid_prefix=f"{secrets.token_hex(4)}-" if journaled else "",
            identity=self._identity,
            slow_reader_bytes=self._settings.slow_reader_bytes,
        )

    def _explainer(self) -> Explainer:
        return Explainer(
            self._statuses,
            self._governors,
            self._estimate_model,
            self._settings.max_rows,
            self.prefix_store.stored_for,
        )

    def connect(
        self,
        *,
        write: Callable[[bytes], None],
        close: Callable[[], None],
        backlog: Callable[[], int],
    ) -> Connection:
        """Add a client.

        `write` buffers bytes, always whole lines, and must not block or raise. `close` ends the
        connection after the buffered bytes were sent; it must cut off a client that does not read
        within a second or two. `backlog` returns the bytes buffered and not yet taken by the
        kernel. The system may still call all three until the event loop's next pass after
        `Connection.closed`; these calls must be harmless.
        """
        number = next(self._numbers)
        socket = Socket(write, close, backlog)
        child = Child(
            f"client-{number}", lambda: Client(number, socket, self._client_services), "temporary"
        )
        client = self._tree.start(child)
        return Connection(client, lambda: self._tree.stop(client))

    def generate(self, request: Generate | Embed, deliver: Callable[[Event], None]) -> Call:
        """Run a request from inside this process.

        Calls `deliver` with each event on the event loop, never before this method returns. After
        `Call.cancel` no more events are delivered; otherwise the last event always is. `deliver`
        must not block: a caller that reads slowly must limit what it buffers, and cancel.
        """
        number = next(self._numbers)
        rid = f"{self._client_services.rid_prefix}{number}.1"
        child = Child(
            f"caller-{number}",
            lambda: Caller(rid, request, deliver, self._client_services.router),
            "temporary",
        )
        return Call(self._tree.start(child))

    async def tokenize(self, request: Tokenize) -> Tokenized:
        """Tokenize a text; loads the model if it must. Raises the request's `KvdError`."""
        text = asyncio.ensure_future(self._client_services.tokenizing.tokenize(request))
        text.add_done_callback(lambda it: it.cancelled() or it.exception())
        return await asyncio.shield(text)  # a cancelled caller's text counts until its reply

    async def load(
        self,
        model: str,
        *,
        alias: str | None = None,
        kv: KVSpec | None = None,
        policy: PolicyChange | None = None,
    ) -> ModelStatus:
        """Load a model and wait until it is ready; raises the KvdError of a failed load.

        A second load of the same model under the same name joins the first.
        """
        load = mail.LoadModel(model, alias, kv, policy or PolicyChange())
        return await self._registry_ref.ask(load)

    def keep_loaded(self, model: str, seconds: float) -> None:
        """Set how long a loaded model stays loaded without requests; negative: no limit."""
        self._registry_ref.tell(mail.KeepLoaded(model, seconds))

    async def load_known(self, name: str) -> ModelStatus:
        """Load a known model as it was loaded or configured before, and wait until it is ready.

        Raises the KvdError of a failed load, and `UnknownModel`.
        """
        known = self._statuses.lookup(name)
        if known is None:
            raise self._statuses.unknown_model(name)
        return await self.load(known.source, alias=name)

    async def unload(self, name: str, *, force: bool = False) -> int:
        """Unload a model and return the bytes freed; raises `UnknownModel`.

        With `force`, its requests end at once.
        """
        return await self._registry_ref.ask(mail.UnloadModel(name, force))

    async def set_policy(self, name: str, fields: Mapping[str, Any]) -> None:
        """Change these fields of a known model's policy; raises `UnknownModel`."""
        await self._registry_ref.ask(mail.SetPolicy(name, fields))

    def events_since(self, number: int) -> list[EventRecord]:
        """Return the records after this one that the event log still has."""
        return self.events.since(number)

    def open_requests(self) -> list[RequestRecord]:
        now = asyncio.get_running_loop().time()
        return open_records(self._router.requests.values(), now)

    def ended_since(self, number: int) -> list[RequestRecord]:
        """Return the ended requests after this one that are still kept."""
        return self._router.log.since(number)

    async def set_budget(self, total_bytes: int) -> None:
        """Set the memory budget; the governor reclaims grants above it."""
        await self._client_services.governor.ask(mail.BudgetRequest(total_bytes))

    def _start_prefix_store(self) -> None:
        # Its failure turns the store off and harms nothing else.
        store = Child(
            "prefix_store", lambda: PrefixStoreActor(self.prefix_store), max_failures=1000
        )
        self._prefix_store_ref: Ref[mail.PrefixStoreMail] = self._tree.start(store)
        self.limit_prefix_store(self._settings.prefix_store)

    def limit_prefix_store(self, limits: StoreLimits) -> None:
        """Set the limits of the prefix store; it gives back what exceeds them."""
        self._prefix_store_ref.tell(mail.PrefixStoreEvent(LimitsChanged(limits)))

    async def add_configured_model(
        self, name: str, known: KnownModel, policy: Mapping[str, Any]
    ) -> bool:
        """See `mail.AddConfiguredModel`."""
        return await self._registry_ref.ask(mail.AddConfiguredModel(name, known, policy))

    async def set_found_models(self, sources: Mapping[str, str]) -> None:
        await self._registry_ref.ask(mail.SetFoundModels(sources))

    async def remove_configured_model(self, name: str) -> None:
        await self._registry_ref.ask(mail.RemoveConfiguredModel(name))

    def status(self) -> DaemonStatus:
        """Return the status without waiting for any actor."""
        identity, governors, host = self._identity, self._governors, self._memory.host()
        return DaemonStatus(
            version=identity.version,
            pid=identity.pid,
            uptime_s=asyncio.get_running_loop().time() - self._started_at,
            home=identity.home,
            state="draining" if self._registry.draining else "serving",
            budget_bytes=self._statuses.devices * governors.budget_bytes,
            granted_bytes=governors.granted_bytes,
            devices=governors.statuses() if self._statuses.devices > 1 else [],
            host_budget=governors.host_status(),
            violations=self._governor.violations,
            footprint_bytes=self._memory.footprint(identity.pid),
            host=host,
            models=self._statuses.all(),
            unloaded=sorted(set(self._statuses.known) - set(self._statuses.models)),
            config_pending=self.reload_status.pending,
            config_error=self.reload_status.error,
            config_reloads=self.reload_status.reloads,
            http=list(identity.http),
            problems=self.problems(host),
            prefix_store=self.prefix_store.status() if self.prefix_store.is_configured else None,
        )

    def _expires_in(self, model: str) -> float | None:
        account, now = self._governors.account(model), asyncio.get_running_loop().time()
        return None if account is None else account.expires_in(now)

    def problems(self, host: HostMemory | None = None) -> list[Problem]:
        """Return the problems of the start and of the budget in effect."""
        budget, host = self._governors.budget_bytes, host or self._memory.host()
        return [*self._find_problems(budget, host), *self.prefix_store.problems()]

    def knows(self, model: str) -> bool:
        """Return whether requests may name this model, loaded or not."""
        return model in self._statuses.known or model in self._statuses.models

    @property
    def busy(self) -> bool:
        return bool(self._router.requests)

    def count_requests(self) -> Counter[tuple[str, Stage]]:
        models, states = self._router.machine.requests, self._router.requests
        return Counter((models[rid].model, state.stage) for rid, state in states.items())

    async def drain(self) -> None:
        """Accept no new work, and return when all requests have ended. Models stay loaded."""
        await self._registry_ref.ask(mail.Drain())

    async def stop(self, *, force: bool = False) -> None:
        """Drain, stop all workers and actors, and return when `finished` is done.

        With `force`, running requests end with ``draining`` errors. A second call with `force`
        during a drain ends the drain, as a second signal to the daemon does.
        """
        self._registry_ref.tell(mail.Shutdown(force))
        await asyncio.wait([self.finished])

    def check(self) -> None:
        """Raise AssertionError if any actor's state is inconsistent; for tests and debugging."""
        for actor in self._tree.actors():
            actor.check()

    def _start_worker(self, name: str, known: KnownModel) -> Ref[mail.WorkerMail]:
        swap, policy = self._settings.swap_folder, known.policy
        load = LoadModel(
            source=known.source,
            kv=known.kv,
            max_context=policy.max_context,
            ranks=policy.ranks,
            prefix_bytes=self._governors.budget_for(policy) // PREFIX_PARTS,
            max_rows=self._settings.max_rows,
            prefill_chunk=self._settings.prefill_chunk,
            lone_chunk=self._settings.lone_chunk,
            attention_scratch=self._settings.attention_scratch,
            time_slices=self._settings.time_slices,
            embeddings=self._settings.embeddings,
            bits_by_layer=self._settings.bits_by_layer,
            # Hashed, because names may have characters that paths may not.
            swap_folder=swap and f"{swap}/{hashlib.sha256(name.encode()).hexdigest()[:16]}",
            swap_bytes=self._settings.swap_bytes,
            segments_folder=self.prefix_store.folder or None,
            prefix_store_on=self.prefix_store.is_configured,
            key_file=self._settings.key_file,
        )
        machine, services = Lifecycle(name, self._settings.patience), self._worker_services
        state = WorkerState(name, load, services, machine, policy.weight, policy.device)
        # Each failure ends the process, whose own restart limit is reached before ten failures.
        return self._tree.start(Child(f"worker-{name}", lambda: Worker(state), max_failures=10))

    def _on_fault(self, error: BaseException) -> None:
        if self._fault is None:
            self._fault = error
            self._end()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        if self._fault is None:
            await self._tree.wait_for_pipes(PIPE_TIMEOUT_S)
        await self._tree.stop_all()
        if self._fault is None:
            self.finished.set_result(None)
            return
        fault = SystemFault(f"a core actor could not be restarted: {self._fault}")
        fault.__cause__ = self._fault
        self.finished.set_exception(fault)
