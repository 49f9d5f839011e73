"""Supervision: who is started again, how often, and what happens when that is not enough.

A *permanent* child is replaced when a message makes it fail; the message is lost, the mailbox and
whatever the factory closes over (a state machine) stay. The factory is where a state that
contradicts itself is found: it raises, and the child cannot be restarted. More than `intensity`
failures in `period_s`, or a factory that raises, end the whole tree: `on_fault` is called once.
A *temporary* child just ends. Children stop in the reverse of their order of start.

Restarts of worker *processes* are not here: they are in `actors.machines.lifecycle`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from actors.ports import Notice, Notify
from actors.runtime.actor import Actor, ActorRunner, Ref

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M")


@dataclass(frozen=True)
class Child(Generic[M]):
    """How a child is started and what its failure means."""

    name: str
    make: Callable[[], Actor[M]]
    restart: Literal["permanent", "temporary"] = "permanent"
    intensity: int = 3
    period_s: float = 60.0


class RestartLimit:
    """Counts failures in a sliding period."""

    def __init__(self, most: int, period_s: float) -> None:
        self._most = most
        self._period_s = period_s
        self._failures: deque[float] = deque()

    def again(self, now: float) -> bool:
        """Count a failure, and say whether there may be another start."""
        self._failures.append(now)
        while self._failures[0] <= now - self._period_s:
            self._failures.popleft()
        return len(self._failures) <= self._most


class SupervisionTree:
    """All actors of a system, in their order of start."""

    def __init__(self, on_fault: Callable[[BaseException], None], notify: Notify) -> None:
        self._on_fault = on_fault
        self._notify = notify
        self._cells: dict[Ref[Any], ActorRunner[Any]] = {}

    def start(self, child: Child[M]) -> Ref[M]:
        """Start a child and return its address."""
        actor = child.make()
        ref: Ref[M] = Ref(child.name, actor.mailbox_limit)
        intensity = RestartLimit(child.intensity, child.period_s)
        cell = ActorRunner(ref, actor, lambda error: self._heir(child, intensity, error))
        self._cells[ref] = cell
        cell.start()
        if cell.task is not None:
            cell.task.add_done_callback(lambda task: self._ended(ref, task))
        return ref

    def actors(self) -> list[Actor[Any]]:
        """Return the actors as they are now, for their invariants to be checked."""
        return [cell.actor for cell in self._cells.values()]

    def stop(self, ref: Ref[Any]) -> None:
        """Stop one child."""
        if ref in self._cells:
            self._cells[ref].stop()

    async def settle(self, timeout_s: float) -> None:
        """Wait until no slow work runs for any actor."""
        pipes = [task for ref in self._cells for task in ref.pipes]
        if pipes:
            await asyncio.wait(pipes, timeout=timeout_s)

    async def stop_all(self) -> None:
        """Stop all children, the youngest first."""
        while self._cells:
            cell = self._cells[next(reversed(self._cells))]
            cell.stop()
            if cell.task is not None:
                await asyncio.wait([cell.task])
            self._cells.pop(cell.ref, None)

    def _heir(
        self, child: Child[M], intensity: RestartLimit, error: BaseException
    ) -> Actor[M] | None:
        self._notify(Notice("actor_failed", "error", {"actor": child.name}, error))
        if child.restart == "temporary":
            return None
        if not intensity.again(asyncio.get_running_loop().time()):
            self._on_fault(error)
            return None
        try:
            return child.make()
        except Exception as broken:  # noqa: BLE001 - any failure to start is the same end
            self._notify(Notice("actor_lost", "error", {"actor": child.name}, broken))
            self._on_fault(broken)
            return None

    def _ended(self, ref: Ref[Any], task: asyncio.Task[None]) -> None:
        self._cells.pop(ref, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)
