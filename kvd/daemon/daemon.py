"""The composition root: home, lock, log, actors, socket, signals, and what the exit code says.

The only place that knows all parts. Knows no MLX: models live in their workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

import kvd
from actors.saved_requests import SavedRequests
from actors.system import Identity, Settings, System, SystemFault
from kvd.config import config
from kvd.config.http import laid_over
from kvd.config.options import Options
from kvd.config.reload import Reloader, known_as, named
from kvd.config.settings import LiveSettings
from kvd.config.sources import absolute
from kvd.daemon.estimate import Files, machine
from kvd.daemon.journal import DiskJournal
from kvd.daemon.spawn import Spawner
from kvd.host import blas, files, listen, logs, memory
from kvd.host.exits import Exit
from kvd.host.home import check_socket_path
from kvd.host.units import format_bytes
from kvd.http.listeners import check_keys, open_listeners
from kvd.metrics.exposition import Exposition
from kvd.service import activation
from kvd.service.notify import Notifier
from protocol.errors import ConfigError, KvdError
from protocol.policy import ModelPolicy
from protocol.types import KVSpec

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Sequence

    from actors.known_models import KnownModel
    from actors.ports import Notice
    from kvd.config.config import Config, ModelEntry
    from kvd.config.http import HttpSettings
    from kvd.host.home import Home
    from kvd.http.listeners import Listener
    from kvd.http.server import Server
    from protocol.types import ModelStatus


_SAME_SIGNAL_S = 0.5
"""A signal so soon after another is the same one: the terminal or `timeout` sends it to the whole
group, and `make` passes on its own copy."""


@dataclass(frozen=True)
class Start:
    """A model to load when the daemon starts."""

    source: str
    alias: str | None = None
    kv: KVSpec = field(default_factory=KVSpec)
    policy: ModelPolicy = field(default_factory=ModelPolicy)


def run(options: Options) -> Exit:
    """Serve until told to stop; raises KvdError if it cannot even start."""
    os.umask(0o077)  # what we write, and what workers write, is the user's own
    files.raise_limit()
    if _by_launchd():
        logs.bound(sys.stderr.fileno())
    manager, given = Notifier.from_environment(), activation.take()
    home = options.home
    check_socket_path(home.socket)
    home.create()
    settings = config.load(home.config)
    with listen.hold_lock(home):
        logs.setup(home.logs, settings.log_level, aloud=not _by_launchd())
        with contextlib.ExitStack() as opened:
            http = laid_over(settings.http, options.http)
            listeners = open_listeners(home, http, given.get(activation.HTTP, ()))
            for http_listener in listeners:
                opened.callback(http_listener.close)
            daemon = Daemon(options, settings, manager, listeners)
            if activation.KVD in given:  # the path is the manager's, and outlives us
                listener = given[activation.KVD][0]
            else:
                listener = listen.bind(home.socket)
                opened.callback(home.socket.unlink, missing_ok=True)
            opened.callback(listener.close)
            return asyncio.run(daemon.serve(listener))


class Daemon:
    """One run of the daemon."""

    def __init__(
        self,
        options: Options,
        settings: Config,
        manager: Notifier | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._options = options
        self._listeners = listeners
        self._settings = settings
        self._manager = manager or Notifier()
        self._log = structlog.get_logger("kvd.daemon.daemon")
        readings = memory.reader()
        budget = options.budget_bytes
        if budget is None:
            budget = settings.budget_bytes
        library = blas.choose(settings.blas)
        attention = options.attention or settings.attention
        self._budget = memory.default_budget(readings.host()) if budget is None else budget
        self._blas = library
        self._journal = _journal_of(options.home, settings)
        limits = self._limits = Settings(
            max_rows=settings.max_rows,
            prefill_chunk=settings.chunk,
            time_slices=settings.time_slices,
            patience=settings.watchdog,
            swap_folder=str(options.home.swap),
            swap_bytes=settings.swap_bytes,
        )
        self._metrics = Exposition(lambda: self._system)
        self._system = System(
            Spawner(
                fake=options.fake,
                blas=library,
                native=settings.native,
                attention=attention,
                calibration=options.home.calibration,
            ),
            readings,
            budget_bytes=self._budget,
            identity=Identity(
                version=kvd.__version__,
                home=str(options.home.root),
                pid=os.getpid(),
                http=tuple(listener.address for listener in listeners),
            ),
            settings=limits,
            estimate_model=Files(machine(settings.native, limits, attention)),
            known=_known(options, settings),
            notify=_notify,
            saved_requests=_saved_requests_of(self._journal, settings),
            observe=self._metrics.tally,
            metrics=self._metrics.text,
        )
        self._reloader = Reloader(
            options,
            settings,
            self._system,
            default_budget=lambda: memory.default_budget(readings.host()),
            bring=self._bring,
            admit=self._admit,
        )
        self._web: Server | None = None
        self._system.configuration = LiveSettings(
            options,
            self._reloader,
            self._system,
            lambda: memory.default_budget(readings.host()),
        )
        self._stops: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """What signals have begun beside a stop."""
        self._signalled_at = float("-inf")

    async def serve(self, listener: socket.socket) -> Exit:
        """Run actors and socket until `finished`."""
        started = time.monotonic()
        shutil.rmtree(self._options.home.swap, ignore_errors=True)  # nobody comes back for it
        await self._system.start()
        self._metrics.start()
        server = await listen.serve(listener, self._system.connect)
        self._take_signals()
        loading = asyncio.create_task(self._load_models(), name="models at start")
        loading.add_done_callback(self._check)
        await self._serve_http(starting=lambda: not loading.done())
        self._log.info(
            "daemon started",
            version=kvd.__version__,
            pid=os.getpid(),
            socket=str(self._options.home.socket),
            http=", ".join(listener.address for listener in self._listeners) or None,
            budget=format_bytes(self._budget),
            blas=str(self._blas) if self._blas else None,
        )
        self._manager.ready(f"serves {self._options.home.socket}")
        try:
            await asyncio.shield(self._system.finished)
        except SystemFault as fault:
            self._log.critical("daemon failed", reason=str(fault), exc_info=fault)
            return Exit.FAILED
        finally:
            for task in (loading, *self._tasks):
                task.cancel()
            self._metrics.stop()
            server.close()
            if self._web is not None:
                await self._web.close()
            await asyncio.gather(loading, *self._tasks, *self._stops, return_exceptions=True)
            self._manager.close()
            if self._journal is not None:
                self._journal.close()
        self._log.info("daemon stopped", uptime_s=round(time.monotonic() - started, 1))
        return Exit.OK

    async def _serve_http(self, *, starting: Callable[[], bool]) -> None:
        if not self._listeners:
            return
        from kvd.http.server import Server  # noqa: PLC0415 - 10 MB that not everybody wants

        unread = self._limits.slow_reader_bytes
        self._web = Server(  # before it starts: keys that come meanwhile are for it too
            self._system,
            self._reloader.settings.http,
            self._listeners,
            metrics=self._metrics.answer,
            answered=self._metrics.answered,
            unread_limit=unread,
            starting=starting,
        )
        await self._web.start()

    def _admit(self, http: HttpSettings) -> None:
        check_keys(self._listeners, http)
        if self._web is not None:
            self._web.apply(http)

    async def _load_models(self) -> None:
        """Load the models of command line or configuration, one after the other, and say so."""
        loaded: list[ModelStatus] = []
        failed: list[tuple[str, str]] = []
        for start in self._starts():
            loading = await self._load(start)
            if isinstance(loading, KvdError):
                failed.append((start.alias or start.source, loading.message))
            else:
                loaded.append(loading)
        if self._system.status().state == "serving":
            with contextlib.suppress(OSError):  # nobody has to read it
                http = [listener.address for listener in self._listeners]
                print(welcome(self._options.home, loaded, failed, http), flush=True)  # noqa: T201

    def _starts(self) -> list[Start]:
        options = self._options
        if options.models:
            return [Start(absolute(model), kv=options.kv) for model in options.models]
        home = options.home.root
        return [_start_of(entry, home) for entry in self._settings.entries if entry.load == "start"]

    async def _load(self, start: Start) -> ModelStatus | KvdError:
        try:
            return await self._system.load(
                start.source, alias=start.alias, kv=start.kv, policy=start.policy
            )
        except KvdError as error:
            # The daemon goes on: the other models work, and `load` can be tried again.
            self._log.error("model not loaded", model=start.source, reason=error.message)
            return error

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        # A terminal that goes away ends what it started; `nohup` says that this one stays.
        stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not _has_terminal()
        if stays:
            loop.add_signal_handler(signal.SIGHUP, self._begin, self._reload)
        else:
            loop.add_signal_handler(signal.SIGHUP, self._signalled, signal.SIGHUP)

    def _signalled(self, number: signal.Signals) -> None:
        """Drain at the first signal; force at the second."""
        now = asyncio.get_running_loop().time()
        if now - self._signalled_at < _SAME_SIGNAL_S:
            return
        force, self._signalled_at = bool(self._stops), now
        self._log.info("stopping", signal=number.name, force=force)
        task = asyncio.create_task(self._stop(force=force), name=f"stop on {number.name}")
        task.add_done_callback(self._check)
        self._stops.add(task)

    def _begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Have it done beside the rest, unless we are about to end."""
        if self._stops:
            return
        task = asyncio.create_task(work(), name=getattr(work, "__name__", "work"))
        task.add_done_callback(self._check)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)

    async def _reload(self) -> None:
        """Read the configuration again; a wrong one is refused, and the one before holds on."""
        self._manager.reloading()
        self._log.info("reads the configuration again", path=str(self._options.home.config))
        news = self._system.reload_status
        try:
            changes = await self._reloader.reload()
        except ConfigError as error:
            news.error = error.message
            self._log.error("configuration refused", reason=error.message, key=error.detail["key"])
        else:
            news.error, news.pending = None, list(self._reloader.waiting)
            done = sum(not change.pending for change in changes)
            self._log.info("configuration read", changed=done, waiting=news.pending)
        finally:  # a manager that hears nothing more takes it for one that still reloads
            news.reloads += 1
            self._manager.ready(_told(news.error, news.pending))

    def _bring(self, entry: ModelEntry) -> None:
        """Load a model that the configuration has now."""

        async def bring() -> None:
            await self._load(_start_of(entry, self._options.home.root))

        self._begin(bring)

    def _check(self, task: asyncio.Task[None]) -> None:
        """Log what a task of ours died of: a bug."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("task failed", task=task.get_name(), exc_info=error)

    async def _stop(self, *, force: bool) -> None:
        patience = self._reloader.settings.drain_timeout_s
        self._manager.stopping("ends what runs" if force else "finishes what runs", patience)
        if not force:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    return await asyncio.shield(self._system.stop())
            self._log.warning("drain took too long", timeout_s=patience)
        return await self._system.stop(force=True)


def _journal_of(home: Home, settings: Config) -> DiskJournal | None:
    if settings.journal != "disk":
        return None
    limit, keep = settings.journal_bytes, settings.journal_keep_s
    return DiskJournal(home.journal, limit_bytes=limit, keep_s=keep)


def _saved_requests_of(journal: DiskJournal | None, settings: Config) -> SavedRequests:
    saved = {} if journal is None else journal.saved
    return SavedRequests(journal, saved, settings.journal_keep_s)


def _known(options: Options, settings: Config) -> dict[str, KnownModel]:
    """Return the models of the configuration: a request brings them, loaded at start or not."""
    root = options.home.root
    return {name: known_as(entry, root) for name, entry in named(settings).items()}


def _start_of(entry: ModelEntry, root: Path) -> Start:
    return Start(absolute(entry.source, root), entry.alias, entry.kv_spec, entry.policy)


def _by_launchd() -> bool:
    """Return whether stderr is a file of launchd's, for what goes wrong before there is a log."""
    return os.environ.get("KVD_SERVICE") == "launchd"


def _has_terminal() -> bool:
    """Return whether a terminal controls us, which is gone one day."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _told(error: str | None, waits: list[str]) -> str:
    """Return for the service manager what came of a reload."""
    if error is not None:
        return f"serves with the configuration before: {error}"
    return f"serves; {', '.join(waits)} hold from the next start on" if waits else "serves"


def _notify(notice: Notice) -> None:
    """Write what the actors report into the log."""
    log = structlog.get_logger("kvd.actors")
    # A name that is the log's own would raise, and take down the actor that reports.
    fields = {f"its_{k}" if k in _OF_THE_LOG else k: v for k, v in notice.fields.items()}
    log.log(_LEVELS[notice.level], notice.event, exc_info=notice.error, **fields)


_OF_THE_LOG = frozenset({"level", "event", "exc_info", "logger", "timestamp"})
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def welcome(
    home: Home,
    loaded: list[ModelStatus],
    failed: list[tuple[str, str]],
    http: Sequence[str] = (),
) -> str:
    """Return what a person reads once the daemon is up: where it is, and what to try."""
    kvctl = _command("kvctl")
    if home.root != Path("~/.kvd").expanduser():
        kvctl += f" --home {shlex.quote(str(home.root))}"
    model = loaded[0].name if loaded else None
    models = ", ".join(f"{m.name} ({m.kv.name})" for m in loaded) or "no model yet"
    tries = [f"{kvctl} status"]
    if model:
        tries += [
            f'{kvctl} generate {shlex.quote(model)} "To open a file," --max-tokens 64',
            f"{kvctl} chat {shlex.quote(model)}",
        ]
    elif not failed:
        tries += [f"{kvctl} load demo", f'{kvctl} generate demo "To open a file,"']
    lines = [f"kvd {kvd.__version__} serves {models}"]
    lines += [f"failed  {name}: {reason}" for name, reason in failed]
    lines.append(f"socket  {home.socket}")
    lines += [f"http    {address}/v1" for address in http if address.startswith("http:")]
    lines += [("try     " if i == 0 else "        ") + line for i, line in enumerate(tries)]
    return "\n".join([*lines, "stop    Ctrl-C"])


def _command(name: str) -> str:
    """Return how to call a script that was installed beside this interpreter."""
    path = Path(sys.executable).with_name(name)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and Path(folder, name).exists():
            return name if Path(folder, name).samefile(path) else str(path)
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
