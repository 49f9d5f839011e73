"""What MLX says of itself, asked in a process of its own: a fault there is an answer, too."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from kvd.host import blas
from kvd.host.environment import environment
from protocol.errors import ConfigError, InternalError, KvdError

_MODULE = "kvd.worker.tools.examine"
_MOST_S = 60.0


def ask(arguments: tuple[str, ...] = (), most_s: float = _MOST_S) -> dict[str, Any] | KvdError:
    """Return what a process with a worker's environment finds, or why it does not answer."""
    try:
        library = blas.choose("auto")
    except ConfigError:
        library = None
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", _MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=most_s,
            check=False,
            env=environment(library),
        )
    except subprocess.TimeoutExpired:
        return InternalError(f"it did not answer in {most_s:g} s")
    last = done.stdout.rstrip().rpartition("\n")[2]
    try:
        found: dict[str, Any] = msgspec.json.decode(last, type=dict[str, Any])
    except msgspec.DecodeError:
        words = done.stderr.strip().rpartition("\n")[2] or "it said nothing"
        return InternalError(f"exit status {done.returncode}: {words}")
    return found
