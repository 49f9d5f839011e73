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

    def total_with(self, missing_pages: int) -> int:
        """Return the grant that covers so many pages more."""
        return self.base_bytes + (self.pages + missing_pages) * self.page_bytes

    def is_denied(self, missing_pages: int) -> bool:
        """Return whether so much, or less, was denied already and nothing has changed since."""
        return self.denied is not None and self.total_with(missing_pages) >= self.denied_bytes

    def want(self, missing_pages: int) -> GrantWanted | None:
        """Ask for more pages, unless a wish is open or so much was just denied."""
        if self.open_bytes is not None or missing_pages <= 0 or self.is_denied(missing_pages):
            return None
        return self._ask(self.total_with(missing_pages), f"{missing_pages} more pages")

    def give_back(self, pages: int) -> GrantWanted | None:
        """Return what is above ``pages``; the daemon cannot say no, so it is gone at once."""
        if self.open_bytes is not None or pages >= self.pages:
            return None
        self.granted_bytes = self.base_bytes + pages * self.page_bytes
        return self._ask(self.granted_bytes, "not needed any more")

    def withdraw(self) -> GrantWanted | None:
        """Take a denied wish back: the daemon remembers it, and would grant it to nobody."""
        if self.open_bytes is not None or not self.remembered:
            return None
        self.denied = None
        return self._ask(self.granted_bytes, "the request is gone")

    def _ask(self, total: int, reason: str) -> GrantWanted:
        self.seq += 1
        self.open_bytes = total
        return GrantWanted(seq=self.seq, total_bytes=total, reason=reason)

    def answer(self, grant: Grant) -> None:
        """Take the daemon's answer; one to an older wish came before the open one was read."""
        if grant.seq != self.seq:
            return
        self.granted_bytes = grant.total_bytes
        self.remembered = not grant.granted
        if grant.granted:
            self.denied = None
        else:
            self.denied, self.denied_bytes = grant, self.open_bytes or grant.total_bytes
        self.open_bytes = None

    def refusal(self, missing_pages: int) -> KvdError:
        """Say why the next request cannot run although no other row holds memory here."""
        grant = self.denied
        if grant is None:
            raise ValueError("no wish was denied")
        total = self.total_with(missing_pages)
        arithmetic = {
            "base_bytes": self.base_bytes,
            "page_bytes": self.page_bytes,
            "needed_bytes": total,
            "budget_bytes": grant.budget_bytes,
            "available_bytes": grant.available_bytes,
        }
        if total > grant.budget_bytes:
            return InsufficientMemory(
                f"the request needs {mebibytes(total)} with the model's weights, and the whole"
                f" budget is {mebibytes(grant.budget_bytes)}: shorten the prompt, lower max_tokens"
                " or raise the budget",
                **arithmetic,
            )
        return Overloaded(
            "other models hold the memory that the request needs: try again, or unload one",
            retry_after_s=RETRY_AFTER_S,
            **arithmetic,
        )
