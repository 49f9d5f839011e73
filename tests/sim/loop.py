"""A simulated event loop: its clock jumps to the next timer when no task can run.

It never sleeps, so minutes of a test pass in milliseconds, and in the same order each time. It
supports timers and callbacks only: no sockets, no subprocesses, no threads.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class DeadlockError(AssertionError):
    """Every task waits and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks. Passes the time for which it would have blocked to `jump`."""

    def __init__(self) -> None:
        super().__init__()
        self.jump: Callable[[float], None] = lambda _: None

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise DeadlockError("every task waits, and no timer is set")
        if timeout > 0:
            self.jump(timeout)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _JumpingSelector()
        selector.jump = self._jump
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function at once: threads know nothing of simulated time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller receives it
            future.set_exception(error)
        return future

    def _jump(self, timeout: float) -> None:
        self.now += timeout


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a simulated loop."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        errors: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, context: errors.append(context))
        try:
            return runner.run(main)
        finally:
            if errors:
                raise AssertionError(errors[0]) from errors[0].get("exception")


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn a coroutine function into a test that runs on the simulated loop."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return wrapper


async def until(
    condition: Callable[[], Any], limit_s: float = 1000.0, *, every_s: float = 0.01
) -> Any:
    """Wait in simulated time until the condition holds; return its value."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while not (value := condition()):
        assert loop.time() < end, f"not within {limit_s} s"
        await asyncio.sleep(every_s)
    return value
