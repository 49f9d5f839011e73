"""Which requests run, and the memory that they need: the queue and the grant as one. Pure.

An admitted row's worst case is covered by the grant until it ends: rows are never admitted on
memory that the daemon has not said yes to, and what is held never exceeds what is granted.
Shared by the real engine and the fake one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.budget import PageBudget
from kvd.worker.scheduler import Plan, Scheduler
from protocol.errors import KvdError
from protocol.worker import Grant, GrantWanted


@dataclass(frozen=True)
class Held:
    """What the engine holds now, used or not."""

    pages: int = 0
    """In the pools."""
    rows: int = 0
    """Tails."""


@dataclass(frozen=True)
class Turn:
    """What to do next: a plan, and what to tell the daemon and one client."""

    plan: Plan
    wish: GrantWanted | None = None
    refused: tuple[str, KvdError] | None = None
    """A request that cannot run here; it is still scheduled until `Admission.finish`."""


class Admission:
    """The scheduler and the budget of one engine.

    ``row_pages``: what a row's tail takes, in pages; ``rest_pages``: what an idle engine keeps.
    """

    def __init__(
        self, scheduler: Scheduler, budget: PageBudget, *, row_pages: int, rest_pages: int
    ) -> None:
        self.scheduler = scheduler
        self.budget = budget
        self._row_pages = row_pages
        self._rest_pages = rest_pages
        self._news = False
        """Whether a plan may say something else than the last one."""

    @property
    def has_work(self) -> bool:
        """Whether another `turn` or `rest` would do something now."""
        scheduler = self.scheduler
        return bool(
            scheduler.prefilling
            or scheduler.decoding
            or (scheduler.waiting and self._news)
            or self._can_rest
        )

    @property
    def idle(self) -> bool:
        """Whether no request is there at all."""
        return not self.scheduler.requests

    def submit(self, rid: str, prompt_len: int, max_new: int) -> None:
        """Put a request at the end of the queue."""
        self.scheduler.submit(rid, prompt_len, max_new)
        if self.scheduler.head == rid:  # behind another it has to wait anyway
            self._news = True

    def finish(self, rid: str) -> None:
        """Forget a request in whatever state; nothing may read its pages any more."""
        self.scheduler.finish(rid)
        self.budget.denied = None  # memory became free here: what was denied may be asked again
        self._news = True

    def granted(self, grant: Grant) -> None:
        """Take the daemon's answer."""
        self.budget.answer(grant)
        self._news = True

    def lacking(self, pages: int, rows: int, held: Held) -> int:
        """Return the pages that the grant lacks for rows that reserve so much."""
        tails = max(held.rows, rows) * self._row_pages
        return max(held.pages, pages) + tails - self.budget.pages

    def turn(self, held: Held) -> Turn:
        """Admit what fits; for what does not, ask, first for all that wait, then for the head."""
        self._news = False
        plan = self.scheduler.plan(lambda pages, rows: self.lacking(pages, rows, held))
        if not plan.wanted_pages:
            return Turn(plan)
        budget = self.budget
        wish = budget.want(plan.hoped_pages) or budget.want(plan.wanted_pages)
        alone = not (self.scheduler.prefilling or self.scheduler.decoding)
        head = self.scheduler.head
        if wish is None and alone and budget.is_denied(plan.wanted_pages) and head is not None:
            refusal = budget.refusal(plan.wanted_pages)
            return Turn(plan, budget.withdraw(), (head, refusal))
        return Turn(plan, wish)

    @property
    def _can_rest(self) -> bool:
        budget = self.budget
        above = budget.pages > self._rest_pages or budget.denied is not None
        return self.idle and budget.open_bytes is None and above

    def rest(self) -> GrantWanted | None:
        """With nobody there, give back what an idle engine does not keep; call `shrink` before."""
        if not self.idle:
            return None
        return self.budget.give_back(self._rest_pages) or self.budget.withdraw()
