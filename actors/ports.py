"""What the actors need from the outside world: a process to talk to, memory readings, a log.

The adapters are in `kvd` (spawn, memory, logs), the fakes in `tests/sim`. Time is not here: the
shells read their event loop's clock, which the simulated loop of the tests replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from actors.telemetry import Observation
from protocol.costs import Estimate
from protocol.settings import Changed, Setting
from protocol.types import HostMemory, KVSpec
from protocol.worker import Command, Report


@dataclass(frozen=True)
class Exit:
    """How a worker process ended."""

    returncode: int
    """Negative: the signal that ended it, as `subprocess` says it."""
    starved: bool = False
    """It was the kernel that killed it, for want of memory, as far as that can be told."""


class WorkerProcess(Protocol):
    """One engine process, alive or dead. Nothing here blocks or raises after its death."""

    @property
    def pid(self) -> int:
        """The process id, also after its death."""
        ...

    def send(self, command: Command) -> None:
        """Buffer a command for the process; after its death do nothing."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


class SpawnWorker(Protocol):
    """Start an engine process.

    Reports and the exit come by callbacks on the event loop, all reports that the process wrote
    before its exit; nothing comes after `on_exit`. They may come before this coroutine returns.
    Raises OSError or KvdError if the process cannot be started; then no callback is called.
    A bad frame from the process: the adapter kills it, and the exit follows.
    """

    async def __call__(
        self,
        name: str,
        *,
        on_report: Callable[[Report], None],
        on_exit: Callable[[Exit], None],
    ) -> WorkerProcess:
        """Start the process of the model called `name`."""
        ...


class MemoryReader(Protocol):
    """Memory readings of this machine."""

    def host(self) -> HostMemory:
        """Read what the machine has and has left."""
        ...

    def footprint(self, pid: int) -> int:
        """Read what a process really takes, in bytes; 0 if it is gone."""
        ...

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        """Read the same of several that may be large, beside the event loop."""
        ...

    @property
    def separate(self) -> bool:
        """Whether the accelerator has memory of its own: the budget is of that."""
        ...


class Configuration(Protocol):
    """The configuration of this daemon."""

    @property
    def table(self) -> list[Setting]:
        """Every setting as it holds now."""
        ...

    async def change(self, values: Mapping[str, Any]) -> list[Changed]:
        """Let these values hold as far as they can, all or none; raises the KvdError of a bad one.

        None stands for what the file says.
        """
        ...

    async def budget_changed(self, total_bytes: int) -> None:
        """Note that a client sets the budget, once the changes before are done.

        The caller tells the governor in the same breath, so that both hear of budgets in one order.
        """
        ...


class EstimateModel(Protocol):
    """Say what a model costs that is not loaded, from its files."""

    async def __call__(self, source: str, kv: KVSpec) -> Estimate:
        """Return the estimate; raises the KvdError of files that are not there, or broken."""
        ...


Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Notice:
    """Something that a log should have, as a value: adapters turn it into lines."""

    event: str
    """Such as ``model_state``, ``worker_exit``, ``request_done``, ``actor_failed``."""
    level: Level = "info"
    fields: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    """With its traceback, where there is one."""


Notify = Callable[[Notice], None]
"""Called on the event loop; must not block, must not raise."""

Observe = Callable[[Observation], None]
"""The same, for each token that goes to a client and for all else that may be counted: quick."""


def ignore_observation(_: Observation) -> None:
    """Count nothing."""


Metrics = Callable[[], Coroutine[Any, Any, str]]
"""Returns what Prometheus reads."""


async def no_metrics() -> str:
    """Measure nothing."""
    return ""
