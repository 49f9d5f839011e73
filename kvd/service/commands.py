"""The manager's own programs, run and understood."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from protocol.errors import ServiceError

_MOST_S = 600.0
"""A stop waits until what runs is finished."""


def run(command: list[str]) -> str:
    """Run a program and return what it prints; raises `ServiceError` with its own words."""
    done = _ended(command)
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise ServiceError(f"`{shlex.join(command)}`: {words}", command=shlex.join(command))
    return done.stdout


def said(command: list[str]) -> str | None:
    """Run a program and return what it prints; None if it fails."""
    done = _ended(command)
    return None if done.returncode else done.stdout


def tail(paths: list[Path], lines: int, *, follow: bool) -> list[str]:
    """Return the command that shows the ends of files, and goes on when they are rotated."""
    return ["tail", "-q", "-n", str(lines), *(["-F"] if follow else []), *map(str, paths)]


def _ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - a manager's own program, no shell
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MOST_S,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise ServiceError(f"{command[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{shlex.join(command)}` did not end in {_MOST_S:g} s") from None
