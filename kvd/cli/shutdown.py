"""`kvctl drain` and `shutdown`."""

from __future__ import annotations

import fcntl
import time
from typing import Annotated

import typer

from kvd.cli.common import HomeOption, JsonOption, SocketOption, Terms, talk, terms
from kvd.host.exits import Exit

_GONE_S = 10.0
"""How long `shutdown` waits for the process to end after its goodbye."""


def drain(
    context: typer.Context,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Take no new work and wait until nothing runs; the daemon stays up."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        client.drain()
        if wanted.json:
            wanted.print_json({"state": "drained"})
        else:
            talk("drained; `kvctl shutdown` ends the daemon")


def shutdown(
    context: typer.Context,
    *,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="End what runs instead of finishing it.")
    ] = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Drain, then end the daemon; returns when its home is free."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        client.shutdown(force=force)
        gone = _wait_until_gone(wanted)
        if wanted.json:
            wanted.print_json({"state": "stopped" if gone else "stopping"})
        elif gone:
            talk("stopped")
        else:
            talk(f"still lives {_GONE_S:g} s after its goodbye; try again, or end its process")
        if not gone:
            raise typer.Exit(Exit.RETRY)


def _wait_until_gone(wanted: Terms) -> bool:
    """Wait until the daemon's lock is free, so that the next one can start at once.

    Return whether it is.
    """
    deadline = time.monotonic() + _GONE_S
    try:
        with wanted.lock.open("rb") as lock:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02)
                else:
                    return True
    except FileNotFoundError:
        return True  # a socket outside of a home
    return False
