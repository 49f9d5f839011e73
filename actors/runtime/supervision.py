"""Supervision: which actors are restarted, how often, and what happens when that fails.

A *permanent* child is replaced when a tell makes it fail. The message is lost; the mailbox and the
state that the factory closes over are kept. The factory raises if that state is inconsistent, and
then the child cannot be restarted. A factory that raises, or more than `max_failures` failures in
`period_s`, end the whole tree: `on_fault` is called once. A *temporary* child is not restarted.
Children stop in reverse order of their start.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from actors.ports import Notice, Notify
from actors.runtime.actor import Actor, ActorRunner, Ref

M = TypeVar("M")


@dataclass(frozen=True)
class Child(Generic[M]):
    """How a child is started, and how its failures are handled."""

    name: str
    make: Callable[[], Actor[M]]
    restart: Literal["permanent", "temporary"] = "permanent"
    max_failures: int = 3
    period_s: float = 60.0


class RestartLimit:
    """Counts failures in a sliding period."""

    def __init__(self, max_failures: int, period_s: float) -> None:
        self._max_failures = max_failures
        self._period_s = period_s
        self._failures: deque[float] = deque()

    def allows_restart(self, now: float) -> bool:
        """Count a failure; return whether the limit allows a restart."""
        self._failures.append(now)
        while self._failures[0] <= now - self._period_s:
            self._failures.popleft()
        return len(self._failures) <= self._max_failures


class SupervisionTree:
    """All actors of a system, in the order of their start."""

    def __init__(self, on_fault: Callable[[BaseException], None], notify: Notify) -> None:
        self._on_fault = on_fault
        self._notify = notify
        self._runners: dict[Ref[Any], ActorRunner[Any]] = {}

    def start(self, child: Child[M]) -> Ref[M]:
        actor = child.make()
        ref: Ref[M] = Ref(child.name, actor.mailbox_limit)
        limit = RestartLimit(child.max_failures, child.period_s)
        runner = ActorRunner(ref, actor, lambda error: self._replacement(child, limit, error))
        self._runners[ref] = runner
        runner.start()
        if runner.task is not None:
            runner.task.add_done_callback(lambda task: self._on_done(ref, task))
        return ref

    def actors(self) -> list[Actor[Any]]:
        return [runner.actor for runner in self._runners.values()]

    def stop(self, ref: Ref[Any]) -> None:
        if ref in self._runners:
            self._runners[ref].stop()

    async def wait_for_pipes(self, timeout_s: float) -> None:
        pipes = [task for ref in self._runners for task in ref.pipes]
        if pipes:
            await asyncio.wait(pipes, timeout=timeout_s)

    async def stop_all(self) -> None:
        while self._runners:
            runner = self._runners[next(reversed(self._runners))]
            runner.stop()
            if runner.task is not None:
                await asyncio.wait([runner.task])
            self._runners.pop(runner.ref, None)

    def _replacement(
        self, child: Child[M], limit: RestartLimit, error: BaseException
    ) -> Actor[M] | None:
        self._notify(Notice("actor_failed", "error", {"actor": child.name}, error))
        if child.restart == "temporary":
            return None
        if not limit.allows_restart(asyncio.get_running_loop().time()):
            self._on_fault(error)
            return None
        try:
            return child.make()
        except Exception as fault:  # noqa: BLE001 - any failure of the factory ends the tree
            self._notify(Notice("actor_lost", "error", {"actor": child.name}, fault))
            self._on_fault(fault)
            return None

    def _on_done(self, ref: Ref[Any], task: asyncio.Task[None]) -> None:
        self._runners.pop(ref, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)
