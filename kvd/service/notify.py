"""Notifies systemd that the daemon is ready, reloads, stops, or is alive: sd_notify(3).

Without systemd nothing is sent. Sending never blocks and never fails.
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
"""Seconds for workers to end after the drain, before systemd kills the service."""


class Notifier:
    """Sends notifications to systemd, if it started this process."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """``watchdog_s``: systemd's limit between two keepalives."""
        self._address = address
        self._every_s = None if watchdog_s is None else watchdog_s / 2
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def from_environment(cls, variables: MutableMapping[str, str] | None = None) -> Notifier:
        """Return a notifier; remove systemd's variables, which child processes must not see."""
        variables = os.environ if variables is None else variables
        address = variables.pop("NOTIFY_SOCKET", None)
        microseconds = variables.pop("WATCHDOG_USEC", "")
        pid = variables.pop("WATCHDOG_PID", str(os.getpid()))
        watched = microseconds.isdigit() and int(microseconds) > 0 and pid == str(os.getpid())
        return cls(address or None, int(microseconds) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Report that clients can connect; also starts the keepalives of the event loop."""
        self._send(f"READY=1\nSTATUS={_line(status)}")
        if self._every_s is not None and self._timer is None:
            self._keep_alive()

    def reloading(self) -> None:
        """Report a reload of the configuration; `ready` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now}\nSTATUS=reloading the configuration")

    def stopping(self, status: str, within_s: float) -> None:
        """Report that the daemon stops, and how long that may take."""
        timeout_us = int((within_s + _SLACK_S) * 1e6)
        self._send(f"STOPPING=1\nSTATUS={_line(status)}\nEXTEND_TIMEOUT_USEC={timeout_us}")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _keep_alive(self) -> None:
        assert self._every_s is not None
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._keep_alive)

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        # A leading @ stands for the zero byte of abstract socket names.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)
            sender.sendto(text.encode(), address)


def _line(text: str) -> str:
    return " ".join(text.split())
