"""Ends a call of Python code that computes for too long, such as a chat template's loops.

A timer's signal interrupts the main thread. Its handler reads the thread's CPU time: time in which
the process was stopped or waited for a processor does not count. A single call of code in C is
interrupted only when it returns; the watchdog bounds that.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Exceeded(BaseException):
    """The call is over its time. No `Exception`, so that the called code cannot handle it."""


def limit_cpu(seconds: float, call: Callable[[], T]) -> T:
    """Return the call's result; raise `TimeoutError` once it has used ``seconds`` of CPU time.

    Outside the main thread, the call is not limited. Uses ``SIGALRM``.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    end, active = time.thread_time() + seconds, True

    def check(*_: Any) -> None:
        if not active:  # the signal came while the timer was being stopped
            return
        if (left := end - time.thread_time()) <= 0:
            raise _Exceeded
        signal.setitimer(signal.ITIMER_REAL, left)

    signal.signal(signal.SIGALRM, check)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return call()
        finally:
            active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Exceeded:
        raise TimeoutError(f"more than {seconds:g} s of CPU time") from None
