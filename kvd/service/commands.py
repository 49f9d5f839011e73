"""Runs the service manager's command-line programs."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from protocol.errors import ServiceError

_TIMEOUT_S = 600.0
"""Long, because stopping the service waits for running requests."""


def run(command: list[str]) -> str:
    """Run a program and return its output; raises `ServiceError` with its error message."""
    done = _completed(command)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        shown = shlex.join(command)
        raise ServiceError(f"`{shown}`: {reason}", command=shown)
    return done.stdout


def output(command: list[str]) -> str | None:
    """Run a program and return its output; None if it fails."""
    done = _completed(command)
    return None if done.returncode else done.stdout


def tail(paths: list[Path], lines: int, *, follow: bool) -> list[str]:
    """Return the command that shows the ends of files and follows them across rotation."""
    return ["tail", "-q", "-n", str(lines), *(["-F"] if follow else []), *map(str, paths)]


def _completed(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - the manager's program, no shell
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise ServiceError(f"{command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{shlex.join(command)}` did not end in {_TIMEOUT_S:g} s") from None
