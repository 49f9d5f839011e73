"""The exit codes of `kvd` and `kvctl`, and which error gives which.

Scripts rely on them: numbers are never reused for another meaning.
"""

from __future__ import annotations

import enum

from protocol.errors import (
    AlreadyRunning,
    ConfigError,
    InvalidRequest,
    KvdError,
    ModelError,
    NotRunning,
    UnknownRequest,
)


class Exit(enum.IntEnum):
    """What a command says by its end."""

    OK = 0
    FAILED = 1
    """Anything that is not below, such as a model that does not fit; the message says what."""
    USAGE = 2
    """The command line is wrong."""
    NOT_RUNNING = 3
    """No daemon answers on the socket."""
    ALREADY_RUNNING = 4
    """Another daemon holds the home."""
    CONFIG = 5
    """The configuration or the home is wrong."""
    REFUSED = 6
    """The request asks for what cannot be: no such model, a prompt too long."""
    RETRY = 7
    """It may work as it is in a moment: the worker died, the daemon drains, too much waits."""
    INTERRUPTED = 130
    """Ctrl-C."""
    PIPE = 141
    """Whoever read our output has hung up."""
    TERMINATED = 143
    """SIGTERM."""


def of(error: KvdError) -> Exit:
    """Return the exit code for an error."""
    match error:
        case NotRunning():
            return Exit.NOT_RUNNING
        case AlreadyRunning():
            return Exit.ALREADY_RUNNING
        case ConfigError():
            return Exit.CONFIG
        case InvalidRequest() | ModelError() | UnknownRequest():
            return Exit.REFUSED
        case _ if error.retryable:
            return Exit.RETRY
        case _:
            return Exit.FAILED
