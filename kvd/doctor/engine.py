"""Examines MLX in a separate process, because it may crash."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from kvd.host import blas
from kvd.host.environment import environment
from protocol.errors import InternalError, KvdError

_MODULE = "kvd.worker.tools.examine"


def ask(arguments: tuple[str, ...] = (), timeout_s: float = 60.0) -> dict[str, Any] | KvdError:
    """Return what a process with a worker's environment reports about MLX, or its error."""
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", _MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment(blas.choose("auto")),
        )
    except subprocess.TimeoutExpired:
        return InternalError(f"no answer within {timeout_s:g} s")
    last = done.stdout.rstrip().rpartition("\n")[2]
    try:
        return msgspec.json.decode(last, type=dict[str, Any])
    except msgspec.DecodeError:
        reason = done.stderr.strip().rpartition("\n")[2] or "no output"
        return InternalError(f"exit status {done.returncode}: {reason}")
