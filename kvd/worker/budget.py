"""How much memory this worker may use, as pages: integers only, no tensors.

The worker holds a *base* (interpreter, weights, scratch, allocator cache) for good, and a grant
from the daemon above it. What the grant leaves over the base is pages. A row's tail is counted in
pages too, so that one number says whether a row fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InsufficientMemory, KvdError, Overloaded
from protocol.worker import Grant, GrantWanted

RETRY_AFTER_S = 1.0


@dataclass
class PageBudget:
    """The worker's side of its grant."""

    base_bytes: int
    page_bytes: int
    granted_bytes: int
    seq: int = 0
    """Of the newest request; at most one is open."""
    waiting: bool = False
    """Whether a request is open."""
    denied: Grant | None = None
    """The last answer, if it was no and nothing has changed since."""

    @property
    def pages(self) -> int:
        """Pages that the grant covers."""
        return max(0, self.granted_bytes - self.base_bytes) // self.page_bytes

    def want(self, missing_pages: int) -> GrantWanted | None:
        """Ask for more pages, unless a request is open or was just denied."""
        if self.waiting or self.denied is not None or missing_pages <= 0:
            return None
        total = self.base_bytes + (self.pages + missing_pages) * self.page_bytes
        return self._ask(total, f"{missing_pages} more pages for the next request")

    def give_back(self, needed_pages: int) -> GrantWanted | None:
        """Return what is above ``needed_pages``; the daemon cannot say no to that."""
        if self.waiting or needed_pages >= self.pages:
            return None
        return self._ask(self.base_bytes + needed_pages * self.page_bytes, "idle")

    def _ask(self, total: int, reason: str) -> GrantWanted:
        self.seq += 1
        self.waiting = True
        return GrantWanted(seq=self.seq, total_bytes=total, reason=reason)

    def answer(self, grant: Grant) -> None:
        """Take the daemon's answer; answers to older requests only carry the total."""
        self.granted_bytes = grant.total_bytes
        if grant.seq == self.seq:
            self.waiting = False
            self.denied = None if grant.granted else grant

    def changed(self) -> None:
        """Note that memory may have become free here: a denied request may be made again."""
        self.denied = None

    def refusal(self, missing_pages: int) -> KvdError:
        """Say why the next request cannot run although no other row holds memory here."""
        grant = self.denied
        if grant is None:
            raise ValueError("no request was denied")
        total = self.base_bytes + (self.pages + missing_pages) * self.page_bytes
        arithmetic = {
            "base_bytes": self.base_bytes,
            "page_bytes": self.page_bytes,
            "needed_bytes": total,
            "budget_bytes": grant.budget_bytes,
            "available_bytes": grant.available_bytes,
        }
        if total > grant.budget_bytes:
            return InsufficientMemory(
                f"the request needs {total} bytes with the model's weights, and the whole budget is"
                f" {grant.budget_bytes}: shorten the prompt, lower max_tokens or raise the budget",
                **arithmetic,
            )
        return Overloaded(
            "other models hold the memory that the request needs: try again, or unload one",
            retry_after_s=RETRY_AFTER_S,
            **arithmetic,
        )
