"""How much memory this worker may use, as pages: integers only, no tensors.

The worker holds a *base* (interpreter, weights, scratch, allocator cache) for good, and a grant
from the daemon above it. What the grant leaves over the base is pages. A row's tail is counted in
pages too, so that one number says whether a row fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested


def mebibytes(count: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 2**20:,.1f} MiB"


@dataclass
class PageBudget:
    """The worker's side of its grant. At most one wish is open at a time."""

    base_bytes: int
    page_bytes: int
    granted_bytes: int
    seq: int = 0
    """Of the newest wish."""
    budget_bytes: int = 0
    """Of all models, as the daemon said last; 0: it has not."""
    open_bytes: int | None = None
    """The total of the wish that awaits its answer."""
    denied: Grant | None = None
    """The newest answer, if it was no and nothing has become free here since."""
    denied_bytes: int = 0
    """The total that it was about."""
    remembered: bool = False
    """Whether the daemon has a denied wish in mind, and will grant it when there is room."""

    @property
    def pages(self) -> int:
        """Pages that the grant covers."""
        return max(0, self.granted_bytes - self.base_bytes) // self.page_bytes

    def too_large(self, pages: int) -> bool:
        """Return whether so many pages could not be had if nobody else held any memory."""
        return 0 < self.budget_bytes < self.base_bytes + pages * self.page_bytes

    def total_with(self, missing_pages: int) -> int:
        """Return the grant that covers so many pages more."""
        return self.base_bytes + (self.pages + missing_pages) * self.page_bytes

    def is_denied(self, missing_pages: int) -> bool:
        """Return whether so much, or less, was denied already and nothing has changed since."""
        return self.denied is not None and self.total_with(missing_pages) >= self.denied_bytes

    def want(self, missing_pages: int) -> MemoryRequested | None:
        """Ask for more pages, unless a wish is open or so much was just denied."""
        if self.open_bytes is not None or missing_pages <= 0 or self.is_denied(missing_pages):
            return None
        return self._ask(self.total_with(missing_pages), f"{missing_pages} more pages")

    def give_back(self, pages: int) -> MemoryRequested | None:
        """Return what is above ``pages``; the daemon cannot say no, so it is gone at once."""
        if self.open_bytes is not None:
            return None
        return self.hand_over(pages)

    def hand_over(self, pages: int) -> MemoryRequested | None:
        """Do the same even if a wish is open: it is forgotten, and so is its answer."""
        if pages >= self.pages:
            return None
        self.granted_bytes = self.base_bytes + pages * self.page_bytes
        return self._ask(self.granted_bytes, "not needed any more")

    def withdraw(self) -> MemoryRequested | None:
        """Take a denied wish back: the daemon remembers it, and would grant it to nobody."""
        if self.open_bytes is not None or not self.remembered:
            return None
        self.denied = None
        return self._ask(self.granted_bytes, "the request is gone")

    def _ask(self, total: int, reason: str) -> MemoryRequested:
        self.seq += 1
        self.open_bytes = total
        return MemoryRequested(seq=self.seq, total_bytes=total, reason=reason)

    def answer(self, grant: Grant) -> None:
        """Take the daemon's answer; one to an older wish came before the open one was read."""
        self.budget_bytes = grant.budget_bytes or self.budget_bytes
        if grant.seq != self.seq:
            return
        self.granted_bytes = grant.total_bytes
        self.remembered = not grant.granted
        if grant.granted:
            self.denied = None
        else:
            self.denied, self.denied_bytes = grant, self.open_bytes or grant.total_bytes
        self.open_bytes = None

    def refusal(self, pages: int) -> InsufficientMemory:
        """Say why a request that takes so many pages can never run."""
        total = self.base_bytes + pages * self.page_bytes
        return InsufficientMemory(
            f"the request needs {mebibytes(pages * self.page_bytes)} beside the model's"
            f" {mebibytes(self.base_bytes)}, {mebibytes(total)} in all, and the budget without what"
            f" pinned models keep is {mebibytes(self.budget_bytes)}: shorten the prompt, lower"
            " max_tokens or raise the budget",
            base_bytes=self.base_bytes,
            page_bytes=self.page_bytes,
            needed_bytes=total,
            budget_bytes=self.budget_bytes,
        )
