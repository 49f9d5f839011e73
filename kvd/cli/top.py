"""`kvctl top`: the daemon on a whole screen, live. What it shows is `kvd.cli.top_page`'s.

Looking happens in a thread of its own: keys are answered at once also while the daemon is not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.live import Live

from kvd.cli import top_page
from kvd.cli.common import HomeOption, SocketOption, Terms, terms
from kvd.cli.keyboard import Keyboard
from kvd.cli.polling import Watch
from protocol.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.messages import EventRecord
    from protocol.types import DaemonStatus


def top(
    context: typer.Context,
    *,
    interval: float = typer.Option(1.0, metavar="SECONDS", min=0.25, help="Between two looks."),
    home: HomeOption = None,
    socket: SocketOption = None,
) -> None:
    """Watch the daemon on a whole screen; ? shows the keys, q quits."""
    wanted = terms(context, home, socket)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter("top needs a terminal; `kvctl status --watch` does not")
    with wanted.guarded(), Watch(wanted) as watch:
        watch.status()  # a daemon that is not there is said on the usual screen
    Screen(wanted, top_page.View(interval_s=interval)).run()


class Looker(threading.Thread):
    """Looks now and then, and keeps what it saw until it is taken."""

    def __init__(self, terms: Terms, interval_s: float, tell: Callable[[], None]) -> None:
        super().__init__(name="looker", daemon=True)
        self.interval_s = interval_s
        self._terms = terms
        self._tell = tell
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._status: DaemonStatus | None = None
        self._news: list[EventRecord] = []
        self._error: KvdError | None = None

    def run(self) -> None:
        """Look until `end`."""
        with Watch(self._terms) as watch:
            while not self._over.is_set():
                try:
                    status, news = watch.status(), watch.news()
                except KvdError as error:
                    with self._lock:
                        self._error = error
                else:
                    with self._lock:
                        self._status, self._error = status, None
                        self._news += news
                self._tell()
                self._over.wait(self.interval_s)

    def end(self) -> None:
        """Look no more."""
        self._over.set()

    def take(self) -> tuple[DaemonStatus | None, list[EventRecord], KvdError | None]:
        """Return what is new since the last time."""
        with self._lock:
            taken = self._status, self._news, self._error
            self._status, self._news = None, []
        return taken


class Screen:
    """The terminal, from the first picture to the last."""

    def __init__(self, terms: Terms, view: top_page.View) -> None:
        self._view = view
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, screen=True)
        self._status: DaemonStatus | None = None
        self._terms = terms

    def run(self) -> None:
        """Show until the user leaves."""
        with Keyboard() as keyboard:
            looker = Looker(self._terms, self._view.interval_s, keyboard.wake)
            looker.start()
            try:
                self._live.start()
                while self._turn(keyboard, looker):
                    pass
            except KeyboardInterrupt:
                pass
            finally:
                looker.end()
                self._live.stop()

    def _turn(self, keyboard: Keyboard, looker: Looker) -> bool:
        """Wait for something, and show what came of it; return whether to go on."""
        for key in keyboard.wait(1.0):
            if key == "q":
                return False
            if key == "stop":
                self._rest(keyboard)
            else:
                self._view.press(key, self._status)
        looker.interval_s = self._view.interval_s
        self._take(looker)
        self._show()
        return True

    def _take(self, looker: Looker) -> None:
        if self._view.paused:
            return
        status, news, error = looker.take()
        if status is not None:
            self._status = status
            self._view.take(status, news)
        if error is not None:
            self._view.away = error.message

    def _show(self) -> None:
        size = self._console.size
        shown = top_page.page(self._view, self._status, size.width, size.height)
        self._live.update(shown, refresh=True)

    def _rest(self, keyboard: Keyboard) -> None:
        """Stop as any program does at Ctrl-Z, and go on from there."""
        self._live.stop()
        keyboard.end()
        os.kill(os.getpid(), signal.SIGSTOP)
        keyboard.begin()
        self._live = Live(console=self._console, auto_refresh=False, screen=True)
        self._live.start()
