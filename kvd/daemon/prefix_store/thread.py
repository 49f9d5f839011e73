"""The thread that runs the disk commands of the prefix store in order.

A slow or hanging disk delays only the commands behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import structlog

from actors.machines import prefix_store_events as ev

Done = Callable[[ev.DiskEvent], None]
CLOSE_S = 2.0
"""Seconds that `DiskThread.close` waits for the commands before it."""


class DiskThread:
    """Runs a `StoreDisk` in a thread; implements `actors.prefix_store.SegmentDisk`."""

    def __init__(self, folder: Path, key_file: Path | None = None) -> None:
        self._folder = folder
        self._key_file = key_file
        self._queue: SimpleQueue[tuple[ev.DiskCommand, Done] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, command: ev.DiskCommand, done: Done) -> None:
        """Run a command after all earlier ones; call `done` on the event loop with its answer."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            # A daemon thread: a hanging disk must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="prefix store", daemon=True)
            self._thread.start()
        self._queue.put((command, done))

    def close(self) -> None:
        """Run the remaining commands, if that does not take long."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        assert self._loop is not None
        # Most daemons have no prefix store, and sqlite takes 2 MB of memory.
        from kvd.daemon.prefix_store.disk import StoreDisk  # noqa: PLC0415
        from kvd.daemon.prefix_store.folder import SegmentFolder  # noqa: PLC0415

        disk = StoreDisk(SegmentFolder(self._folder), self._key_file)
        log = structlog.get_logger(__name__)
        while (item := self._queue.get()) is not None:
            command, done = item
            try:
                answer = disk.run(command)
            except OSError as error:
                answer = ev.DiskFailed(str(error))
            except Exception as error:
                log.warning("prefix store failed", command=type(command).__name__, exc_info=True)
                answer = ev.DiskFailed(f"{type(error).__name__}: {error}")
            if answer is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(done, answer)
        disk.close()
