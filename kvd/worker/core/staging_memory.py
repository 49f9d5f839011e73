"""The memory of records between an engine and the threads of the prefix store.

A model that is loaded while the store has no limit is not charged for it. Once the store is on, the
engine requests the memory. Until it is granted, segments are neither offered nor read.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.scheduling.admission import Admission
from protocol.worker import MemoryRequested


class StagingMemory:
    """The charge of one engine. ``charged``: whether the load has charged ``nbytes`` already."""

    def __init__(
        self,
        admission: Admission,
        memory: MemoryAccount,
        nbytes: int,
        request: Callable[[MemoryRequested | None], None],
        *,
        charged: bool,
    ) -> None:
        self._admission = admission
        self._memory = memory
        self._pages = -(-nbytes // admission.budget.page_bytes)
        self._request = request
        self._wanted = False
        self.charged = charged

    def obtain(self) -> None:
        """Charge the memory now, or request it and charge it once it is granted."""
        self._wanted = True
        self.request()

    def request(self) -> None:
        """Request the memory again if it is wanted: an idle engine withdraws denied requests."""
        self.charge()
        if self._wanted and not self.charged:
            held = self._memory.held()
            self._request(self._admission.request_spare(self._pages, held))

    def charge(self) -> None:
        """Charge the memory if it is wanted and that many pages are spare."""
        if not self._wanted or self.charged:
            return
        if self._admission.spare_pages(self._memory.held()) >= self._pages:
            budget = self._admission.budget
            budget.base_bytes += self._pages * budget.page_bytes
            self.charged = True
