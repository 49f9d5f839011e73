"""Describes how a process of the selftest ended."""

from __future__ import annotations

import signal
from typing import IO


def death(status: int) -> str:
    """Return the signal or the exit status, from a process's return code."""
    if status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def last_error(errors: IO[str]) -> str:
    """Return the most informative last line of a process's errors."""
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    telling = [line for line in lines if "rror" in line or "Fatal" in line]
    return (telling or lines or [""])[-1][:300]
