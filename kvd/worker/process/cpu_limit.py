"""Ends a call of Python code that computes for too long, such as a chat template's loops.

A timer's signal interrupts the main thread. Its handler reads the thread's CPU time: time in which
the process was stopped or waited for a processor does not count. A single call of code in C is
interrupted only when it returns; the watchdog bounds that.

Python drops an exception that is raised in a finalizer or in a callback of the garbage collector.
The timer therefore continues until the call has ended.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_AGAIN_S = 0.1
"""Seconds until the call is ended again, if it still computes."""


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
        left = end - time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, left if left > 0 else _AGAIN_S)
        if left <= 0:
            raise _Exceeded

    signal.signal(signal.SIGALRM, check)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return call()
        finally:
            active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Exceeded:
        active = False  # a second signal may have interrupted the first assignment
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise TimeoutError(f"more than {seconds:g} s of CPU time") from None
