"""Memory that the device does not have: how MLX says so, and what is done about it at once.

An allocation that fails raises from `mx.eval` or `mx.async_eval`. What was computed before it
stays, what comes after it stays lazy, and the operation itself has not begun: to evaluate the same
arrays again goes on with it. Nothing is computed twice and nothing comes out differently. So
`install` puts functions in the place of these two, in the worker's process, that make room and go
on; whoever evaluates something need not know.

Where that is not enough they raise `Shortage`, and the engine makes more room (`recovery`).

Does not cover: a Metal command buffer that fails for want of memory. The next wait says so; what
it should have written is lost by then, and there is nothing to go on with: `Shortage` at once,
``late``. On the CPU MLX does not notice: the kernel ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

TRIES = 2
"""How often room is made and the same evaluated again. The second time is for what others give
up: memory of a process that has just ended comes back late."""

_MARKS = (
    "[malloc]",  # every backend: "[malloc] Unable to allocate 4096 bytes."
    "[metal::malloc]",  # too many buffers, or one that is too large
    "out of memory",  # CUDA's own words
    "memory allocation failed",
    "insufficient memory",  # Metal, of a command buffer
)
_LATE = "command buffer execution failed"


class Shortage(MemoryError):
    """There is no memory for what is to be computed, and making room did not help.

    ``late``: it has failed already, and everything that was in flight is lost with it.
    """

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.late = late


def shortage_of(error: BaseException) -> Shortage | None:
    """Return what an error of MLX's says about memory, without its traceback; None: nothing."""
    if isinstance(error, Shortage):
        return Shortage(error.reason, late=error.late)
    text = str(error)
    if isinstance(error, MemoryError):
        return Shortage(text or "the host has no memory")
    said = text.lower()
    if isinstance(error, RuntimeError) and any(mark in said for mark in _MARKS):
        return Shortage(text, late=_LATE in said)
    return None


def attempt(work: Callable[..., None], *arguments: Any) -> Shortage | None:
    """Do this; return what memory it lacked, or None if it was done. Other errors are raised.

    What comes back holds nothing of the work: the frames of a traceback hold what a step has
    built, and that holds the pools.
    """
    try:
        work(*arguments)
    except (RuntimeError, MemoryError) as error:
        short = shortage_of(error)
        if short is None:
            raise
        return short
    return None


def give_back_cached() -> None:
    """Wait until nothing is in flight, and give back what the allocator keeps for reuse."""
    mx.synchronize()
    mx.clear_cache()


def install() -> None:
    """Let `mx.eval` and `mx.async_eval` make room and go on, from now on, in this process."""
    for name in ("eval", "async_eval"):
        if not isinstance(getattr(mx, name), Patient):
            setattr(mx, name, Patient(getattr(mx, name)))


class Patient:
    """One of the two functions, which makes room where memory is short."""

    def __init__(self, plain: Callable[..., None]) -> None:
        self.plain = plain
        """MLX's own."""

    def __call__(self, *arrays: Any) -> None:
        """Evaluate; raises `Shortage` if there is no memory for it even so."""
        for _ in range(TRIES):
            short = attempt(self.plain, *arrays)
            if short is None:
                return
            if short.late:
                raise short
            give_back_cached()
        if (short := attempt(self.plain, *arrays)) is not None:
            raise short
