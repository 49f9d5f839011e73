"""Ports: what the actors need from outside, such as processes, memory readings and a log.

There is no port for time: actors read their event loop's clock, and tests run a simulated loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from actors.telemetry import Observation
from protocol.costs import Estimate
from protocol.kv import KVSpec
from protocol.settings import Changed, Setting
from protocol.types import HostMemory, Problem
from protocol.worker import Command, Report


@dataclass(frozen=True)
class Exit:
    """How a worker process ended."""

    returncode: int
    """Exit status; a negative number is the signal that ended the process, as in `subprocess`."""
    starved: bool = False
    """Whether the kernel killed the process because memory was short, as far as that is known."""
    rank: int | None = None
    """The rank of a gang whose exit explains the others'; None for a worker of one process."""


class WorkerProcess(Protocol):
    """One worker, alive or dead: a process, or a gang of several ranks that live and die together.

    No method blocks, or raises after the worker's death. Signals reach all ranks.
    """

    @property
    def pid(self) -> int:
        """Process id of the leader, which is rank 0."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all ranks, in rank order."""

    def send(self, command: Command) -> None:
        """Buffer a command for the leader."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class SpawnWorker(Protocol):
    """Starts the worker of the model called `name`, as this many processes.

    They use `device` and the ones after it, if the machine has several.
    Calls `on_report` and `on_exit` on the event loop: all reports that the processes wrote, then
    one exit after all of them have exited, then nothing. Followers report only `Started`. Calls may
    come before this coroutine returns. Raises OSError or KvdError if a process cannot be started,
    and then calls nothing. Kills a process that sends a malformed frame; its exit follows.
    """

    async def __call__(
        self,
        name: str,
        *,
        ranks: int = 1,
        device: int = 0,
        on_report: Callable[[Report], None],
        on_exit: Callable[[Exit], None],
    ) -> WorkerProcess: ...


class MemoryReader(Protocol):
    """Memory readings of this machine."""

    def host(self) -> HostMemory: ...

    def footprint(self, pid: int) -> int:
        """Return a process's footprint in bytes; 0 if it has ended."""

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        """Read the footprints of several processes in a thread, because that may take long."""

    @property
    def separate(self) -> bool:
        """Whether the accelerator has its own memory, which the budget then refers to."""


class Configuration(Protocol):
    """The configuration of this daemon."""

    @property
    def table(self) -> list[Setting]: ...

    async def change(self, values: Mapping[str, Any]) -> list[Changed]:
        """Change settings by key, all of them or none; None restores the file's value.

        Raises the KvdError of an invalid value.
        """

    async def reload(self) -> list[Changed]:
        """Read the file again and apply it.

        Raises the KvdError of an invalid file, which changes nothing.
        """

    async def budget_changed(self, total_bytes: int) -> None:
        """Wait until earlier changes are applied; then record a budget that a client sets.

        Raises the KvdError of an invalid budget.

        The caller sends it to the governor without another ``await`` in between, so that the
        configuration and the governor apply budgets in the same order.
        """


EstimateModel = Callable[[str, KVSpec, int], Coroutine[Any, Any, Estimate]]
"""Estimates a model's costs from its source's files, its KV settings and its number of ranks;
raises the KvdError of broken files."""

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Notice:
    """A log entry as a value; adapters turn it into log lines."""

    event: str
    """Name such as ``model_state``, ``worker_exit``, ``request_done`` or ``actor_failed``."""
    level: Level = "info"
    fields: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    """Logged with its traceback."""


Notify = Callable[[Notice], None]
"""Called on the event loop; must not block or raise."""

FindProblems = Callable[[int, HostMemory], list[Problem]]
"""Returns the problems of the daemon's start, and those of a budget in bytes on this machine."""

Observe = Callable[[Observation], None]
"""Called on the event loop for every sent token; must be fast, and must not block or raise."""

Metrics = Callable[[], Coroutine[Any, Any, str]]
"""Returns metrics in Prometheus's text format."""
