"""The composition root: builds all parts, handles signals, and returns the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

import kvd
from actors.client import Identity
from actors.saved_requests import SavedRequests
from actors.system import Settings, System, SystemFault
from kvd.config import config
from kvd.config.budget import compare_with_machine
from kvd.config.http import with_command_line
from kvd.config.models_dir import models_dir
from kvd.config.options import Options
from kvd.config.reload import Reloader, known_models
from kvd.config.settings import LiveSettings
from kvd.config.sources import absolute
from kvd.daemon.compaction import in_thread
from kvd.daemon.estimate import FileEstimate, machine
from kvd.daemon.journal import DiskJournal
from kvd.daemon.prefix_store.thread import DiskThread
from kvd.daemon.spawn import Spawner
from kvd.daemon.welcome import welcome
from kvd.host import blas, files, listen, logs, memory
from kvd.host.exits import Exit
from kvd.host.home import check_socket_path
from kvd.host.loop import DaemonLoop
from kvd.host.models_dir import ModelsDir
from kvd.host.units import format_bytes
from kvd.http.listeners import check_keys, open_listeners
from kvd.metrics.exposition import Exposition
from kvd.service import activation
from kvd.service.notify import Notifier
from protocol.errors import ConfigError, KvdError
from protocol.key_file import create_key
from protocol.kv import KVSpec
from protocol.model_source import is_source

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from actors.ports import Notice
    from kvd.config.config import Config, ModelEntry
    from kvd.config.http import HttpSettings
    from kvd.http.listeners import Listener
    from kvd.http.server import Server
    from protocol.settings import Changed
    from protocol.types import ModelStatus, Problem


_SAME_SIGNAL_S = 0.5
"""Signals within this time count as one: terminals and `timeout` signal the whole process group,
and `make` forwards its own copy."""


@dataclass(frozen=True)
class ModelToLoad:
    """A model to load when the daemon starts. Absent values are those of the configuration."""

    source: str
    alias: str | None = None
    kv: KVSpec | None = None


def run(options: Options) -> Exit:
    """Serve until stopped; raises KvdError if the daemon cannot start."""
    os.umask(0o077)  # files of the daemon and its workers are private to the user
    files.raise_limit()
    if _is_launchd_service():
        logs.truncate_if_large(sys.stderr.fileno())
    manager, given = Notifier.from_environment(), activation.take()
    home = options.home
    check_socket_path(home.socket)
    home.create()
    settings = config.load(home.config)
    with listen.hold_lock(home):
        logs.setup(home.logs, settings.log_level, to_stderr=not _is_launchd_service())
        with contextlib.ExitStack() as opened:
            http = with_command_line(
                settings.http,
                options.host,
                options.port,
                default_port=options.default_port,
                off=options.no_http,
            )
            listeners, problems = open_listeners(home, http, given.get(activation.HTTP, ()))
            for http_listener in listeners:
                opened.callback(http_listener.close)
            daemon = Daemon(options, settings, manager, listeners, problems)
            if activation.KVD in given:  # the service manager owns the path
                listener = given[activation.KVD][0]
            else:
                listener = listen.bind(home.socket)
                opened.callback(home.socket.unlink, missing_ok=True)
            opened.callback(listener.close)
            with asyncio.Runner(loop_factory=DaemonLoop) as runner:
                return runner.run(daemon.serve(listener))


class Daemon:
    """One run of the daemon."""

    def __init__(
        self,
        options: Options,
        settings: Config,
        manager: Notifier | None = None,
        listeners: Sequence[Listener] = (),
        problems: Sequence[Problem] = (),
    ) -> None:
        """``problems``: why some configured sockets are missing in ``listeners``."""
        self._options = options
        self._problems = problems
        self._listeners = listeners
        self._settings = settings
        self._manager = manager or Notifier()
        self._log = structlog.get_logger("kvd.daemon.daemon")
        self._memory = memory.reader()
        self._devices = max(1, len(self._memory.devices))
        budget = settings.budget_bytes if options.budget_bytes is None else options.budget_bytes
        self._budget = self._default_budget() if budget is None else budget
        self._blas = blas.choose(settings.blas)
        self._journal: DiskJournal | None = None
        if settings.journal == "disk":
            self._journal = DiskJournal(
                options.home.journal,
                limit_bytes=settings.journal_bytes,
                keep_s=settings.journal_keep_s,
                run=in_thread,
            )
        self._key_file = options.home.key_file if settings.prefix_store.encrypt else None
        self._segments = DiskThread(options.home.prefixes, self._key_file)
        self._metrics = Exposition(lambda: self._system)
        self._system = self._create_system()
        self._reloader = Reloader(
            options,
            settings,
            self._system,
            default_budget=self._default_budget,
            load=self._load_in_background,
            apply_http=self._apply_http,
        )
        self._system.configuration = LiveSettings(options, self._reloader, self._reload)
        self._http: Server | None = None
        self._models_dir = ModelsDir(None)
        self._stops: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """Background tasks other than stops."""
        self._signalled_at = float("-inf")

    def _default_budget(self) -> int:
        return memory.default_budget(self._memory.host())

    def _create_system(self) -> System:
        options, settings = self._options, self._settings
        attention = options.attention or settings.attention
        limits = self._limits = Settings(
            max_rows=settings.max_rows,
            prefill_chunk=settings.chunk,
            lone_chunk=settings.lone_chunk,
            attention_scratch=settings.attention_scratch(self._budget),
            time_slices=settings.time_slices,
            embeddings=settings.embeddings,
            bits_by_layer=settings.bits_by_layer,
            patience=settings.watchdog,
            swap_folder=str(options.home.swap),
            swap_bytes=settings.swap_bytes,
            segments_folder=str(options.home.prefixes),
            key_file=None if self._key_file is None else str(self._key_file),
            prefix_store=settings.prefix_store.limits,
        )
        return System(
            Spawner(
                fake=options.fake,
                blas=self._blas,
                native=settings.native,
                attention=attention,
                calibration=options.home.calibration,
                devices=self._memory.devices if self._devices > 1 else (),
            ),
            self._memory,
            budget_bytes=self._budget,
            devices=self._devices,
            host_bytes=memory.host_budget(self._memory),
            identity=Identity(
                version=kvd.__version__,
                home=str(options.home.root),
                pid=os.getpid(),
                http=tuple(listener.address for listener in self._listeners),
            ),
            settings=limits,
            estimate_model=FileEstimate(machine(settings.native, limits, attention)),
            known=known_models(settings, options.home.root),
            find_model=self._find_model,
            may_load=(lambda _text: True) if options.fake else is_source,
            find_problems=lambda budget_bytes, host: [
                *self._problems,
                *compare_with_machine(budget_bytes, host),
            ],
            notify=_notify,
            saved_requests=SavedRequests(
                self._journal,
                {} if self._journal is None else self._journal.saved,
                settings.journal_keep_s,
            ),
            observe=self._metrics.counters,
            metrics=self._metrics.text,
            segment_disk=self._segments,
        )

    async def serve(self, listener: socket.socket) -> Exit:
        started = time.monotonic()
        shutil.rmtree(self._options.home.swap, ignore_errors=True)  # rows of an earlier daemon
        if self._key_file is not None:
            with contextlib.suppress(OSError):  # opening the store reports it
                create_key(self._key_file)
        await self._system.start()
        self._metrics.start()
        self._handle_signals()  # before a client can know that the daemon runs
        server = await listen.serve(listener, self._system.connect)
        loading = asyncio.create_task(self._load_models(), name="models at start")
        loading.add_done_callback(self._log_failure)
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
        self._log_problems()
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
            if self._http is not None:
                await self._http.close()
            await asyncio.gather(loading, *self._tasks, *self._stops, return_exceptions=True)
            self._manager.close()
            if self._journal is not None:
                self._journal.close()
            self._segments.close()
        self._log.info("daemon stopped", uptime_s=round(time.monotonic() - started, 1))
        return Exit.OK

    async def _serve_http(self, *, starting: Callable[[], bool]) -> None:
        if not self._listeners:
            return
        from kvd.http.server import Server  # noqa: PLC0415 - takes 10 MB of memory

        # Assigned before the server starts, so that a reload in the meantime applies to it.
        self._http = Server(
            self._system,
            self._reloader.settings.http,
            self._listeners,
            control=self._system,
            metrics=self._metrics.answer,
            answered=self._metrics.answered,
            ignored=self._metrics.ignored,
            record=partial(self._system.events.record, "ignored_field", None),
            unread_limit=self._limits.slow_reader_bytes,
            starting=starting,
        )
        await self._http.start()

    def _find_model(self, name: str) -> str | None:
        wanted = models_dir(self._reloader.settings, self._options.home.root)
        if self._models_dir != wanted:
            self._models_dir = wanted
        folder = self._models_dir.find(name)
        return None if folder is None else str(folder)

    def _apply_http(self, http: HttpSettings) -> None:
        check_keys(self._listeners, http)
        if self._http is not None:
            self._http.apply(http)

    async def _load_models(self) -> None:
        """Load the models of the command line or the configuration, then print the welcome."""
        loaded: list[ModelStatus] = []
        failed: list[tuple[str, str]] = []
        for model in self._models_to_load():
            result = await self._load(model)
            if isinstance(result, KvdError):
                failed.append((model.alias or model.source, result.message))
            else:
                loaded.append(result)
        if self._system.status().state == "serving":
            with contextlib.suppress(OSError):  # stdout may be closed
                http = [listener.address for listener in self._listeners]
                problems, page = self._system.problems(), self._reloader.settings.http.ui
                text = welcome(self._options.home, loaded, failed, http, problems, page=page)
                print(text, flush=True)  # noqa: T201

    def _models_to_load(self) -> list[ModelToLoad]:
        options = self._options
        if options.models:
            return [ModelToLoad(absolute(model), kv=options.kv) for model in options.models]
        entries = [entry for entry in self._settings.entries if entry.load == "start"]
        return [_model_to_load(entry, options.home.root) for entry in entries]

    async def _load(self, model: ModelToLoad) -> ModelStatus | KvdError:
        try:
            return await self._system.load(model.source, alias=model.alias, kv=model.kv)
        except KvdError as error:
            # Not fatal: other models are served, and `kvctl load` can retry this one.
            self._log.error("model not loaded", model=model.source, reason=error.message)
            return error

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        # With a terminal, SIGHUP means that the terminal closes, unless `nohup` made it ignored.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not _has_terminal():
            loop.add_signal_handler(signal.SIGHUP, self._start_task, self._reload_on_signal)
        else:
            loop.add_signal_handler(signal.SIGHUP, self._signalled, signal.SIGHUP)

    def _signalled(self, number: signal.Signals) -> None:
        """Drain at the first signal; stop at once at the second."""
        now = asyncio.get_running_loop().time()
        if now - self._signalled_at < _SAME_SIGNAL_S:
            return
        force, self._signalled_at = bool(self._stops), now
        self._log.info("stopping", signal=number.name, force=force)
        task = asyncio.create_task(self._stop(force=force), name=f"stop on {number.name}")
        task.add_done_callback(self._log_failure)
        self._stops.add(task)

    def _start_task(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run a background task, unless the daemon is stopping."""
        if self._stops:
            return
        task = asyncio.create_task(work(), name=getattr(work, "__name__", "work"))
        task.add_done_callback(self._log_failure)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)

    async def _reload_on_signal(self) -> None:
        with contextlib.suppress(ConfigError):  # it is logged, and shown by `status`
            await self._reload()

    async def _reload(self) -> list[Changed]:
        """Reload the configuration; raises `ConfigError` for an invalid one and changes nothing."""
        self._manager.reloading()
        self._log.info("reloading the configuration", path=str(self._options.home.config))
        status = self._system.reload_status
        try:
            changes = await self._reloader.reload()
        except ConfigError as error:
            status.error = error.message
            self._log.error("configuration refused", reason=error.message, key=error.detail["key"])
            raise
        else:
            status.error, status.pending = None, list(self._reloader.pending)
            changed = sum(not change.pending for change in changes)
            self._log.info("configuration reloaded", changed=changed, pending=status.pending)
            self._log_problems()
            return changes
        finally:  # after any error too, because the service manager waits for this message
            status.reloads += 1
            self._manager.ready(_reload_status(status.error, status.pending))

    def _log_problems(self) -> None:
        for problem in self._system.problems():
            self._log.warning(problem.observed, key=problem.key, advice=problem.advice)

    def _load_in_background(self, entry: ModelEntry) -> None:
        async def load_model() -> None:
            await self._load(_model_to_load(entry, self._options.home.root))

        self._start_task(load_model)

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("task failed", task=task.get_name(), exc_info=error)

    async def _stop(self, *, force: bool) -> None:
        timeout_s = self._reloader.settings.drain_timeout_s
        status = "cancelling requests" if force else "finishing running requests"
        self._manager.stopping(status, timeout_s)
        if not force:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(self._system.stop())
            self._log.warning("drain timed out", timeout_s=timeout_s)
        return await self._system.stop(force=True)


def _model_to_load(entry: ModelEntry, root: Path) -> ModelToLoad:
    return ModelToLoad(absolute(entry.source, root), entry.alias)


def _is_launchd_service() -> bool:
    """Return whether launchd started this process; stderr is then a file for early errors."""
    return os.environ.get("KVD_SERVICE") == "launchd"


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _reload_status(error: str | None, pending: list[str]) -> str:
    if error is not None:
        return f"serving with the previous configuration: {error}"
    return f"serving; restart to apply {', '.join(pending)}" if pending else "serving"


def _notify(notice: Notice) -> None:
    log = structlog.get_logger("kvd.actors")
    # structlog raises for fields with its own names, which would end the reporting actor.
    fields = {f"its_{k}" if k in _RESERVED else k: v for k, v in notice.fields.items()}
    log.log(_LEVELS[notice.level], notice.event, exc_info=notice.error, **fields)


_RESERVED = frozenset({"level", "event", "exc_info", "logger", "timestamp"})
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
