"""`kvctl drain` and `kvctl shutdown`."""

from __future__ import annotations

import fcntl
import time

import rich_click as click

from kvd.cli.common import CommonOptions, common_options
from kvd.host.exits import Exit

_EXIT_TIMEOUT_S = 10.0
"""Seconds that `shutdown` waits for the process to end after the daemon has agreed."""


@click.command()
@common_options()
def drain(common: CommonOptions) -> None:
    """Accept no new requests and wait until none run; the daemon stays up."""
    with common.connected() as client:
        client.drain()
        common.print_outcome({"state": "drained"}, "drained; `kvctl shutdown` ends the daemon")


@click.command()
@click.option("--force", is_flag=True, help="Cancel running requests instead of finishing them.")
@common_options()
def shutdown(common: CommonOptions, *, force: bool) -> None:
    """Drain, then end the daemon; returns when its home is free."""
    with common.connected() as client:
        client.shutdown(force=force)
        ended = _wait_until_ended(common)
        if ended:
            common.print_outcome({"state": "stopped"}, "stopped")
            return
        common.print_outcome(
            {"state": "stopping"},
            f"the daemon agreed to stop, and still runs {_EXIT_TIMEOUT_S:g} s later; "
            "try again, or end its process",
        )
        raise SystemExit(Exit.RETRY)


def _wait_until_ended(common: CommonOptions) -> bool:
    """Wait until the daemon's lock is free, so that another daemon can start; False: timed out."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    try:
        with common.lock.open("rb") as lock:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02)
                else:
                    return True
    except FileNotFoundError:
        return True  # a socket outside a home has no lock
    return False
