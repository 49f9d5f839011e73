"""The memory that this worker may use, in pages. Integers only, no tensors.

The worker holds a *base* (interpreter, weights, scratch, allocator cache) permanently. The daemon's
grant minus the base is available for pages. Tails of rows are counted in pages too, so that a
single number decides whether a row fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def load_refusal(total_bytes: int, purpose: str, grant: Grant) -> InsufficientMemory:
    """Return the error of a load whose memory request the daemon refused with ``grant``.

    ``purpose``: what the bytes are for.
    """
    if grant.host_bytes:
        return InsufficientMemory(
            f"the model's processes need {mebibytes(grant.host_bytes)} of the host's memory, but"
            f" only {mebibytes(grant.available_bytes)} of what models may use there are free"
            f" ({grant.reason}): unload a model",
            needed_bytes=grant.host_bytes,
            available_bytes=grant.available_bytes,
        )
    needs = f"the model needs {mebibytes(total_bytes)} ({purpose})"
    budget = mebibytes(grant.budget_bytes)
    free_bytes = grant.available_bytes + grant.total_bytes  # the load keeps what it has
    if total_bytes > grant.budget_bytes:
        text = f"{needs}, more than the whole budget of {budget}: raise the budget"
    else:
        advice = "unpin or unload" if total_bytes > grant.limit_bytes else "unload"
        held = f" ({grant.reason})" if grant.reason else ""
        text = (
            f"{needs}, but only {mebibytes(free_bytes)} of the budget of {budget} are free{held}:"
            f" {advice} a model, or raise the budget"
        )
    return InsufficientMemory(
        text,
        needed_bytes=total_bytes,
        available_bytes=free_bytes,
        limit_bytes=grant.limit_bytes,
        budget_bytes=grant.budget_bytes,
    )


@dataclass
class PageBudget:
    """The worker's side of its grant. At most one memory request is open at a time."""

    base_bytes: int
    page_bytes: int
    granted_bytes: int
    seq: int = 0
    """Sequence number of the newest memory request."""
    limit_bytes: int = 0
    """The most that this model could hold, as in the last `Grant`. 0: not known yet."""
    open_bytes: int | None = None
    """Total of the memory request that awaits its answer."""
    denied: Grant | None = None
    """The newest answer, if it was a denial and no memory was freed here since."""
    denied_bytes: int = 0
    spare_denied_bytes: int | None = None
    """Total of the newest request for spare memory, if it was denied and no memory was freed here
    since. Memory that clients wait for may be requested all the same."""
    _open_is_spare: bool = False
    remembered: bool = False
    """Whether the daemon remembers a denied memory request and will grant it when there is room."""

    @property
    def pages(self) -> int:
        """Pages that the grant covers."""
        return max(0, self.granted_bytes - self.base_bytes) // self.page_bytes

    def too_large(self, pages: int) -> bool:
        """Return whether this many pages exceed the limit."""
        return 0 < self.limit_bytes < self.base_bytes + pages * self.page_bytes

    def total_with(self, missing_pages: int) -> int:
        return self.base_bytes + (self.pages + missing_pages) * self.page_bytes

    def is_denied(self, missing_pages: int) -> bool:
        """Return whether this many more pages, or fewer, were denied and nothing changed since."""
        return self.denied is not None and self.total_with(missing_pages) >= self.denied_bytes

    def request(self, missing_pages: int, *, spare: bool = False) -> MemoryRequested | None:
        """Request more pages, unless a memory request is open or this many were just denied.

        ``spare``: whether no client waits for them.
        """
        if self.open_bytes is not None or missing_pages <= 0 or self.is_denied(missing_pages):
            return None
        total = self.total_with(missing_pages)
        if spare and self.spare_denied_bytes is not None and total >= self.spare_denied_bytes:
            return None
        self._open_is_spare = spare
        return self._request_total(total, f"{missing_pages} more pages")

    def note_freed(self) -> None:
        """Note that memory was freed here: what was denied may be requested again."""
        self.denied = self.spare_denied_bytes = None

    def give_back(self, pages: int) -> MemoryRequested | None:
        """Give back what the grant covers beyond ``pages``.

        The grant shrinks at once, because the daemon cannot deny this. An open memory request is
        replaced, and its answer is ignored.
        """
        if pages >= self.pages:
            return None
        self.granted_bytes = self.base_bytes + pages * self.page_bytes
        self._open_is_spare = False
        return self._request_total(self.granted_bytes, "not needed any more")

    def withdraw(self) -> MemoryRequested | None:
        """Withdraw a denied memory request that the daemon still remembers."""
        if self.open_bytes is not None or not self.remembered:
            return None
        self.note_freed()
        self._open_is_spare = False
        return self._request_total(self.granted_bytes, "the request is gone")

    def _request_total(self, total: int, reason: str) -> MemoryRequested:
        self.seq += 1
        self.open_bytes = total
        return MemoryRequested(seq=self.seq, total_bytes=total, reason=reason)

    def answer(self, grant: Grant) -> None:
        """Apply the daemon's answer; answers to replaced memory requests are ignored."""
        self.limit_bytes = grant.limit_bytes or self.limit_bytes
        if grant.seq != self.seq:
            return
        self.granted_bytes = grant.total_bytes
        self.remembered = not grant.granted
        asked = self.open_bytes or grant.total_bytes
        self.open_bytes = None
        if grant.granted:
            self.note_freed()
        elif self._open_is_spare:
            self.spare_denied_bytes = asked
        else:
            self.denied, self.denied_bytes = grant, asked

    def refusal(self, pages: int) -> InsufficientMemory:
        """Return the error of a request that needs more pages than the limit allows."""
        total = self.base_bytes + pages * self.page_bytes
        return InsufficientMemory(
            f"the request needs {mebibytes(pages * self.page_bytes)} in addition to the model's"
            f" {mebibytes(self.base_bytes)}, {mebibytes(total)} in total; the budget without pinned"
            f" models is {mebibytes(self.limit_bytes)}: shorten the prompt, lower max_tokens or"
            " raise the budget",
            base_bytes=self.base_bytes,
            page_bytes=self.page_bytes,
            needed_bytes=total,
            limit_bytes=self.limit_bytes,
        )
