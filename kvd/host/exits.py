"""The exit codes of `kvd` and `kvctl`. Scripts rely on the numbers, so none is ever reused."""

from __future__ import annotations

import enum

from protocol import errors


class Exit(enum.IntEnum):
    """Exit codes."""

    OK = 0
    FAILED = 1
    """All other errors, such as a model that does not fit."""
    USAGE = 2
    NOT_RUNNING = 3
    ALREADY_RUNNING = 4
    CONFIG = 5
    REFUSED = 6
    """The request is invalid, such as an unknown model or a prompt that is too long."""
    RETRY = 7
    """A retry may succeed: the worker died, the daemon drains, or the queue is full."""
    INTERRUPTED = 130
    PIPE = 141
    """The reader of the output closed the pipe."""
    TERMINATED = 143


def of(error: errors.KvdError) -> Exit:
    match error:
        case errors.NotRunning():
            return Exit.NOT_RUNNING
        case errors.AlreadyRunning():
            return Exit.ALREADY_RUNNING
        case errors.ConfigError():
            return Exit.CONFIG
        case errors.InvalidRequest() | errors.ModelError() | errors.UnknownRequest():
            return Exit.REFUSED
        case _ if error.retryable:
            return Exit.RETRY
        case _:
            return Exit.FAILED
