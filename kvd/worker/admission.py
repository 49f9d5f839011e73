"""Which requests run, and the memory that they need: the queue and the grant as one. Pure.

An admitted row's worst case is covered by the grant until it ends or is parked: rows are never
admitted on memory that the daemon has not said yes to, and what is held never exceeds what is
granted. The order in which memory is sought for the head of the queue:

1. more of the daemon's, for all that wait and have a place, else for the head alone;
2. where that is denied, what cached prefixes hold (`Turn.evict_pages`);
3. what rows give back that end or are parked;
4. where there are none, the request is refused. One that has run before waits on, unless the whole
   budget is too small for it: what is in flight is not given up for want of room.

Shared by the real engine and the fake one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kvd.worker.budget import PageBudget
from kvd.worker.scheduler import Plan, Scheduler
from protocol.errors import KvdError, Overloaded
from protocol.worker import Grant, GrantWanted


@dataclass(frozen=True)
class Held:
    """What the engine holds now, used or not."""

    pages: int = 0
    """In the pools."""
    rows: int = 0
    """Tails."""
    cached: int = 0
    """Of the pages, those that only cached prefixes need; they can be dropped at any time."""
    left: int = 0
    """Of these, what places keep room for: their rows have left the checkpoints that it is for."""


@dataclass(frozen=True)
class Turn:
    """What to do next: a plan, and what to tell the daemon and one client."""

    plan: Plan
    wish: GrantWanted | None = None
    refused: tuple[str, KvdError] | None = None
    """A request that cannot run here; it is still scheduled until `Admission.finish`."""
    evict_pages: int = 0
    """So many pages of cached prefixes must go; drop them, and take another turn."""


class Admission:
    """The scheduler and the budget of one engine.

    ``row_pages``: what a row's tail takes, in pages; ``rest_pages``: what an idle engine keeps.
    """

    def __init__(
        self, scheduler: Scheduler, budget: PageBudget, *, row_pages: int, rest_pages: int
    ) -> None:
        self.scheduler = scheduler
        self.budget = budget
        self.row_pages = row_pages
        self._rest_pages = rest_pages
        self._news = False
        """Whether a plan may say something else than the last one."""
        self._idle_pages = rest_pages
        """What the engine keeps when nobody is there."""

    @property
    def has_work(self) -> bool:
        """Whether another `turn` or `rest` would do something now."""
        scheduler = self.scheduler
        return bool(scheduler.active or (scheduler.waiting and self._news) or self._can_rest)

    @property
    def idle(self) -> bool:
        """Whether no request is there at all."""
        return not self.scheduler.requests

    # A request's way: what `Scheduler` does, and that a plan may say something else afterwards.

    def submit(
        self,
        rid: str,
        prompt_len: int,
        max_new: int,
        *,
        priority: int = 0,
        deadline: float | None = None,
        choices: int = 1,
        path: tuple[Hashable, ...] = (),
    ) -> None:
        """Put a request into the queue."""
        self.scheduler.submit(
            rid,
            prompt_len,
            max_new,
            priority=priority,
            deadline=deadline,
            choices=choices,
            path=path,
        )
        if self.scheduler.head == rid:  # behind another it has to wait anyway
            self._news = True

    def finish(self, rid: str) -> None:
        """Forget a request in whatever state; nothing may read its pages any more."""
        self.scheduler.finish(rid)
        self._freed()

    def finish_choice(self, rid: str) -> None:
        """Take back the place and the pages of one choice of several."""
        self.scheduler.finish_choice(rid)
        self._freed()

    def park(self, rid: str, kept: int = 0) -> None:
        """Take a row out; nothing may read its pages any more, but the ``kept`` ones."""
        self.scheduler.park(rid, kept)
        self._freed()

    def keep(self, rid: str, kept: int) -> None:
        """Let a parked row keep fewer pages."""
        self.scheduler.keep(rid, kept)
        self._freed()

    def unpark(self, rid: str) -> None:
        """Put a parked row back into the queue."""
        self.scheduler.unpark(rid)
        self._news = True

    def _freed(self) -> None:
        self.budget.denied = None  # memory became free here: what was denied may be asked again
        self._news = True

    # Memory.

    def granted(self, grant: Grant) -> None:
        """Take the daemon's answer."""
        self.budget.answer(grant)
        self._news = True

    def lacking(self, pages: int, rows: int, held: Held) -> int:
        """Return the pages that the grant lacks for rows that reserve so much."""
        return self._needed(pages, rows, held) - self.budget.pages

    def spare(self, held: Held) -> int:
        """Return the pages of the grant that nothing holds and no row may come to need."""
        scheduler = self.scheduler
        return self.budget.pages - self._needed(scheduler.reserved, scheduler.places, held)

    def want_spare(self, pages: int, held: Held) -> GrantWanted | None:
        """Ask for what lacks to so many spare pages, for checkpoints; None: nothing, or denied."""
        return self.budget.want(pages - self.spare(held))

    def _needed(self, pages: int, rows: int, held: Held) -> int:
        places = max(held.rows, rows) * self.row_pages - held.left
        return max(held.pages, pages + held.cached) + places

    def turn(self, held: Held) -> Turn:
        """Admit what fits; for what does not, seek memory in the order of the module's page."""
        self._news = False
        plan = self.scheduler.plan(lambda pages, rows: self.lacking(pages, rows, held))
        if not plan.wanted_pages:
            return Turn(plan)
        budget = self.budget
        wish = budget.want(plan.hoped_pages) or budget.want(plan.wanted_pages)  # 1
        if wish is not None or not budget.is_denied(plan.wanted_pages):
            return Turn(plan, wish)
        if held.cached:  # 2
            self._news = True
            return Turn(plan, evict_pages=min(held.cached, plan.wanted_pages))
        if self.scheduler.places:  # 3
            return Turn(plan)
        return self._refuse(plan)

    def _refuse(self, plan: Plan) -> Turn:  # 4
        head = self.scheduler.head
        assert head is not None, "pages are wanted for the head of the queue"
        refusal = self.budget.refusal(plan.wanted_pages)
        if self.scheduler.has_begun(head) and isinstance(refusal, Overloaded):
            return Turn(plan)
        return Turn(plan, self.budget.withdraw(), (head, refusal))

    def give_back(self, pages: int, held: Held) -> GrantWanted | None:
        """Return what is granted above ``pages``, as far as nothing holds or has reserved it.

        None if there is nothing, or a wish is open. Drop what can go before: cached prefixes,
        spare pools, and rows (`Scheduler.victims`, `park`).
        """
        scheduler = self.scheduler
        needed = self._needed(scheduler.reserved, scheduler.places, held)
        return self.budget.give_back(max(pages, needed))

    @property
    def _can_rest(self) -> bool:
        budget = self.budget
        above = budget.pages > self._idle_pages or budget.remembered
        return self.idle and budget.open_bytes is None and above

    def rest(self, cached: int = 0) -> GrantWanted | None:
        """With nobody there, give back what an idle engine does not keep; call `shrink` before.

        ``cached``: pages of cached prefixes, which stay.
        """
        if not self.idle:
            return None
        self._idle_pages = self._rest_pages + cached
        return self.budget.give_back(self._idle_pages) or self.budget.withdraw()
