"""Failed memory allocations: how MLX reports them, and the retry that follows at once.

A failed allocation raises from `mx.eval` or `mx.async_eval`. Arrays computed before it stay
computed, arrays after it stay lazy, and the operation itself has not started. Evaluating the same
arrays again therefore continues where it failed: nothing is computed twice and no result changes.
`install_retries` replaces both functions in the worker's process by ones that free cached memory
and try again, so that callers need no handling of their own.

If that is not enough, they raise `Shortage`, and the engine frees more memory
(`kvd.worker.core.recovery`).

A Metal command buffer that fails for lack of memory is not retried: the next wait reports it, and
by then its results are lost (``in_flight_lost``). On the CPU MLX does not notice a shortage: the
kernel ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvd.worker.process import memory

TRIES = 2
"""Retries after cached memory was freed. The second one gives other processes time: the memory of a
process that just ended is returned late."""

_MARKS = (
    "[malloc]",  # every backend: "[malloc] Unable to allocate 4096 bytes."
    "[metal::malloc]",  # too many buffers, or one that is too large
    "out of memory",  # CUDA
    "memory allocation failed",
    "insufficient memory",  # a Metal command buffer
)
_COMMAND_BUFFER_FAILED = "command buffer execution failed"


class Shortage(MemoryError):
    """An allocation failed, and freeing cached memory did not help.

    ``in_flight_lost``: the computation failed after launch, and everything in flight is lost.
    """

    def __init__(self, reason: str, *, in_flight_lost: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.in_flight_lost = in_flight_lost


def shortage_of(error: BaseException) -> Shortage | None:
    """Return a new `Shortage`, without traceback, if the error reports one; else None."""
    if isinstance(error, Shortage):
        return Shortage(error.reason, in_flight_lost=error.in_flight_lost)
    text = str(error)
    if isinstance(error, MemoryError):
        return Shortage(text or "the host has no memory")
    lower = text.lower()
    if isinstance(error, RuntimeError) and any(mark in lower for mark in _MARKS):
        return Shortage(text, in_flight_lost=_COMMAND_BUFFER_FAILED in lower)
    return None


def attempt(work: Callable[..., None], *arguments: Any) -> Shortage | None:
    """Call ``work``; return its `Shortage`, or None if it succeeded. Other errors are raised.

    The result holds no traceback, whose frames would keep the arrays of the step, and with them
    the pools, alive.
    """
    try:
        work(*arguments)
    except (RuntimeError, MemoryError) as error:
        short = shortage_of(error)
        if short is None:
            raise
        return short
    return None


def clear_allocator_cache() -> None:
    """Wait until nothing is in flight, then free the memory that MLX caches for reuse."""
    mx.synchronize()
    mx.clear_cache()


def give_back() -> None:
    """Return free memory to the system: MLX's freed buffers, and those that malloc keeps."""
    mx.clear_cache()
    memory.trim_malloc()


def install_retries() -> None:
    """Replace `mx.eval` and `mx.async_eval` in this process by `RetryingEval`."""
    for name in ("eval", "async_eval"):
        if not isinstance(getattr(mx, name), RetryingEval):
            setattr(mx, name, RetryingEval(getattr(mx, name)))


class RetryingEval:
    """`mx.eval` or `mx.async_eval`, retried after a failed allocation."""

    def __init__(self, plain: Callable[..., None]) -> None:
        self.plain = plain

    def __call__(self, *arrays: Any) -> None:
        for retries_left in range(TRIES, -1, -1):
            if (short := attempt(self.plain, *arrays)) is None:
                return
            if short.in_flight_lost or not retries_left:
                raise short
            clear_allocator_cache()
