"""`kvctl top`: the daemon on the whole screen, live; `kvd.cli.top_page` renders it.

A thread polls the daemon, so that keys work at once even while the daemon does not answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import rich_click as click
from rich.console import Console
from rich.live import Live

from kvd.cli import top_page
from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.keyboard import Keyboard
from kvd.cli.polling import PollingClient
from kvd.cli.ranges import Seconds
from protocol.errors import KvdError
from protocol.messages import EventRecord
from protocol.types import DaemonStatus


@click.command()
@option("--interval", "SECONDS", "Time between updates.", type=Seconds(0.25), default=1.0)
@common_options("home", "socket")
def top(common: CommonOptions, *, interval: float) -> None:
    """Watch the daemon on the whole screen; ? shows the keys, q quits."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.BadParameter("top needs a terminal; `kvctl status --watch` works without one")
    with common.guarded(), PollingClient(common) as client:
        client.status()  # reports a missing daemon before the screen changes
    Screen(common, top_page.View(interval_s=interval)).run()


class Poller(threading.Thread):
    """Polls the daemon and keeps the results until `take` returns them."""

    def __init__(
        self, common: CommonOptions, interval_s: float, notify: Callable[[], None]
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self.interval_s = interval_s
        self._common = common
        self._notify = notify
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._status: DaemonStatus | None = None
        self._events: list[EventRecord] = []
        self._error: KvdError | None = None

    def run(self) -> None:
        with PollingClient(self._common) as client:
            while not self._stopped.is_set():
                try:
                    status, events = client.status(), client.new_events()
                except KvdError as error:
                    with self._lock:
                        self._error = error
                else:
                    with self._lock:
                        self._status, self._error = status, None
                        self._events += events
                self._notify()
                self._stopped.wait(self.interval_s)

    def stop(self) -> None:
        self._stopped.set()

    def take(self) -> tuple[DaemonStatus | None, list[EventRecord], KvdError | None]:
        """Return the status and events since the last call, and the last poll's error."""
        with self._lock:
            taken = self._status, self._events, self._error
            self._status, self._events = None, []
        return taken


class Screen:
    """The terminal while `kvctl top` runs."""

    def __init__(self, common: CommonOptions, view: top_page.View) -> None:
        self._view = view
        self._console = Console(highlight=False)
        self._live = self._new_live()
        self._status: DaemonStatus | None = None
        self._common = common

    def _new_live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, screen=True)

    def run(self) -> None:
        with Keyboard() as keyboard:
            poller = Poller(self._common, self._view.interval_s, keyboard.wake)
            poller.start()
            try:
                self._live.start()
                while self._update(keyboard, poller):
                    pass
            except KeyboardInterrupt:
                pass
            finally:
                poller.stop()
                self._live.stop()

    def _update(self, keyboard: Keyboard, poller: Poller) -> bool:
        """Wait for a key or new data, and redraw; return False to quit."""
        for key in keyboard.wait(1.0):
            if key == "q":
                return False
            if key == "stop":
                self._suspend(keyboard)
            else:
                self._view.press(key, self._status)
        poller.interval_s = self._view.interval_s
        if not self._view.paused:
            status, events, error = poller.take()
            if status is not None:
                self._status = status
                self._view.take(status, events)
            if error is not None:
                self._view.error = error.message
        size = self._console.size
        page = top_page.page(self._view, self._status, size.width, size.height)
        self._live.update(page, refresh=True)
        return True

    def _suspend(self, keyboard: Keyboard) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and take the screen again afterwards."""
        self._live.stop()
        keyboard.end()
        os.kill(os.getpid(), signal.SIGSTOP)
        keyboard.begin()
        self._live = self._new_live()
        self._live.start()
