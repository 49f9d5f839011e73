"""What the daemon tells the service manager: that it is ready, reloads, stops, and is alive.

systemd's protocol, sd_notify(3): lines of ``KEY=value`` in one datagram. Without a manager that
listens (launchd, a terminal) nothing is sent. Telling never blocks and never fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_SLACK_S = 15.0
"""For workers to end after the drain, before the manager loses its patience."""


class Notifier:
    """The way to the manager, if there is one."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """`watchdog_s`: how long the manager lets us be silent."""
        self._address = address
        self._every_s = None if watchdog_s is None else watchdog_s / 2
        self._beat: asyncio.TimerHandle | None = None

    @classmethod
    def from_environment(cls, variables: MutableMapping[str, str] | None = None) -> Notifier:
        """Return the way that the environment names, and take it out of there.

        What we start must not speak in our name.
        """
        variables = os.environ if variables is None else variables
        address = variables.pop("NOTIFY_SOCKET", None)
        microseconds = variables.pop("WATCHDOG_USEC", "")
        whom = variables.pop("WATCHDOG_PID", str(os.getpid()))
        watched = microseconds.isdigit() and int(microseconds) > 0 and whom == str(os.getpid())
        return cls(address or None, int(microseconds) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Say that clients may come; from now on show that the event loop turns."""
        self._tell(f"READY=1\nSTATUS={_line(status)}")
        if self._every_s is not None and self._beat is None:
            self._show_life()

    def status(self, status: str) -> None:
        """Say in a line what is going on."""
        self._tell(f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """Say that the configuration is read again; `ready` says that it is done."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={now}\nSTATUS=reads the configuration again")

    def stopping(self, status: str, within_s: float) -> None:
        """Say that the end has begun, and how long it may take."""
        patience = int((within_s + _SLACK_S) * 1e6)
        self._tell(f"STOPPING=1\nSTATUS={_line(status)}\nEXTEND_TIMEOUT_USEC={patience}")

    def close(self) -> None:
        """Show no more signs of life."""
        if self._beat is not None:
            self._beat.cancel()

    def _show_life(self) -> None:
        assert self._every_s is not None
        self._tell("WATCHDOG=1")
        self._beat = asyncio.get_running_loop().call_later(self._every_s, self._show_life)

    def _tell(self, text: str) -> None:
        if self._address is None:
            return
        # A leading @ stands for the zero byte of Linux's abstract names.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), _datagrams() as sender:
            sender.sendto(text.encode(), address)


def _datagrams() -> socket.socket:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    return sender


def _line(text: str) -> str:
    return " ".join(text.split())
