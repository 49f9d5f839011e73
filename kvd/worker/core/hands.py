"""What those who work on an engine's rows between its steps may touch and do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvd.worker.core.memory_account import MemoryAccount
    from kvd.worker.core.request import Completion, Request
    from kvd.worker.prefix.cache import PrefixCache
    from kvd.worker.scheduling.admission import Admission
    from kvd.worker.scheduling.scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class Hands:
    """The parts of one engine."""

    cache: Any
    """`ModelCache` or `MlxLmCache`."""
    admission: Admission
    prefix_cache: PrefixCache
    memory_account: MemoryAccount
    requests: dict[str, Request]
    settle: Callable[[], None]
    """Read what is in flight, so that nothing is; a row may end with it."""
    drain: Callable[[], None]
    """Wait for the device."""
    leave: Callable[[Completion], None]
    """Take a completion's row out of the batch, and free it."""
    join: Callable[[Request, Completion, Any], None]
    """Let a completion decode with this row."""

    @property
    def scheduler(self) -> Scheduler:
        """The queue, and who runs."""
        return self.admission.scheduler
