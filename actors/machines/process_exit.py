"""What the exit of a worker process says about its cause."""

from __future__ import annotations

from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, Signals

from protocol.errors import ErrorInfo, InsufficientMemory
from protocol.gang import DIVERGED, PEER_LOST
from protocol.worker import OVER_MEMORY_LIMIT

SELF_INFLICTED_SIGNALS = frozenset({SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE, SIGTRAP, SIGSYS})
"""Signals that a process causes itself. Any other signal comes from a user or a service manager."""

_OF_RANKS = {
    DIVERGED: "ended itself: it was about to compute something else than rank 0",
    PEER_LOST: "ended itself: it lost its connection to another rank",
}

CAUSES = (
    "crashed", "killed", "out_of_memory", "memory_limit", "hung", "not_started", "broke_rules",
    "no_memory",
)  # fmt: skip


def exit_cause(returncode: int, *, out_of_memory: bool) -> str:
    if out_of_memory:
        return "out_of_memory"
    if returncode == OVER_MEMORY_LIMIT:
        return "memory_limit"
    return "crashed" if is_self_inflicted(returncode) else "killed"


def cause_of(error: ErrorInfo | None) -> str:
    """Return why a worker does not run: one of `CAUSES`, or the error's code if it has none."""
    if error is None:
        return ""
    return str(error.detail.get("cause", "no_memory" if lacks_memory(error) else error.code))


def lacks_memory(error: ErrorInfo) -> bool:
    return error.code == InsufficientMemory.code


def is_self_inflicted(returncode: int) -> bool:
    """Return whether the process may have caused its exit itself."""
    return returncode >= 0 or -returncode in SELF_INFLICTED_SIGNALS


def describe(returncode: int) -> str:
    """Return how a process ended, as a phrase that follows its name."""
    if returncode == OVER_MEMORY_LIMIT:
        return "ended itself at its memory limit"
    if returncode in _OF_RANKS:
        return _OF_RANKS[returncode]
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was ended by {Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
