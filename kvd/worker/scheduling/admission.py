"""Which requests run, and the memory that they need: the queue and the grant as one. Pure.

An admitted row's worst case is covered by the grant until it ends or is parked: rows are never
admitted on memory that the daemon has not said yes to, and what is held never exceeds what is
granted. The order in which memory is sought for the head of the queue:

1. more of the daemon's, for all that wait and have a place, else for the head alone;
2. where that is denied, what cached prefixes hold (`Turn.evict_pages`);
3. what rows give back that end or are parked;
4. where there are none, what parked ones keep that stand behind the head (`Turn.spill`);
5. and else it waits: the daemon has the wish in mind, and grants it when others give back.

A request is refused only if the whole budget is too small for it at the lowest level of the ladder,
and then at once: when it comes, or when the budget has become smaller.

Shared by the real engine and the fake one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.positions import Positions
from kvd.worker.scheduling.scheduler import Plan, Scheduler
from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested, RowQueued


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
    wish: MemoryRequested | None = None
    refused: tuple[str, InsufficientMemory] | None = None
    """A request that can never run; it is still scheduled until `Admission.finish`."""
    evict_pages: int = 0
    """So many pages of cached prefixes must go; drop them, and take another turn."""
    spill: bool = False
    """What parked rows keep in memory must go elsewhere: the head waits for it."""
    queued: tuple[RowQueued, ...] = ()
    """Whose place in the queue has changed."""


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
        self.closed = False
        """Whether nobody is admitted: memory is being given back."""
        self._positions = Positions()
        self.start(0)

    def start(self, level: int) -> None:
        """Let new rows start at this level, or the first below it at which they ever fit."""
        lowest = self.scheduler.sizes.lowest
        self.scheduler.start(max(0, min(level, lowest)), self._too_large)
        self._news = True

    def _too_large(self, pages: int, places: int) -> bool:
        return self.budget.too_large(pages + places * self.row_pages)

    @property
    def has_work(self) -> bool:
        """Whether another `turn` or `rest` would do something now."""
        return bool(
            self.scheduler.active or self.may_admit or self._has_positions or self._can_rest
        )

    @property
    def may_admit(self) -> bool:
        """Whether a request waits for which the next `turn` may have room; it has looked else."""
        return self.scheduler.waiting > 0 and self._news and not self.closed

    @property
    def _has_positions(self) -> bool:
        """Whether there are places to tell; while the daemon's answer is on its way, none is."""
        return self._positions.stale and self.budget.open_bytes is None

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
        """Put a request into the queue.

        Raises `InsufficientMemory` if the whole budget is too small for it at the lowest level.
        """
        sizes = self.scheduler.sizes
        first, more = sizes.of(prompt_len, max_new, sizes.lowest)
        pages = first + (choices - 1) * more
        if self._too_large(pages, choices):
            raise self.budget.refusal(pages + choices * self.row_pages)
        self.scheduler.submit(
            rid,
            prompt_len,
            max_new,
            priority=priority,
            deadline=deadline,
            choices=choices,
            path=path,
        )
        self._positions.changed()
        if self.scheduler.head == rid:  # behind another it has to wait anyway
            self._news = True

    def finish(self, rid: str) -> None:
        """Forget a request in whatever state; nothing may read its pages any more."""
        self.scheduler.finish(rid)
        self._positions.forget(rid)
        self._freed()

    def finish_choice(self, rid: str) -> None:
        """Take back the place and the pages of one choice of several."""
        self.scheduler.finish_choice(rid)
        self._freed()

    def preempt(self, rid: str, kept: int = 0) -> None:
        """Take a row out; nothing may read its pages any more, but the ``kept`` ones."""
        self.scheduler.preempt(rid, kept)
        self._freed()

    def keep(self, rid: str, kept: int) -> None:
        """Let a parked row keep fewer pages."""
        self.scheduler.keep(rid, kept)
        self._freed()

    def unpark(self, rid: str) -> None:
        """Put a parked row back into the queue."""
        self.scheduler.unpark(rid)
        self._positions.changed()
        self._news = True

    def lowered(self, rid: str, level: int) -> None:
        """Note that all that a request has is on this level now: its worst case is smaller."""
        self.scheduler.lowered(rid, level)
        self._freed()

    def _freed(self) -> None:
        self.budget.denied = None  # memory became free here: what was denied may be asked again
        self._news = True

    # Memory.

    def granted(self, grant: Grant) -> None:
        """Take the daemon's answer."""
        before = self.budget.budget_bytes
        self.budget.answer(grant)
        if self.budget.budget_bytes != before:
            self.start(self.scheduler.start_level)
        self._news = True

    def lacking(self, pages: int, rows: int, held: Held) -> int:
        """Return the pages that the grant lacks for rows that reserve so much."""
        return self._needed(pages, rows, held) - self.budget.pages

    def spare(self, held: Held) -> int:
        """Return the pages of the grant that nothing holds and no row may come to need."""
        scheduler = self.scheduler
        return self.budget.pages - self._needed(scheduler.reserved, scheduler.places, held)

    def want_spare(self, pages: int, held: Held) -> MemoryRequested | None:
        """Ask for what lacks to so many spare pages, for checkpoints; None: nothing, or denied."""
        return self.budget.want(pages - self.spare(held))

    def _needed(self, pages: int, rows: int, held: Held) -> int:
        places = max(held.rows, rows) * self.row_pages - held.left
        return max(held.pages, pages + held.cached) + places

    def turn(self, held: Held) -> Turn:
        """Admit what fits; for what does not, seek memory in the order of the module's page."""
        turn = self._turn(held)
        if not self._has_positions:
            return turn
        return replace_fields(turn, queued=tuple(self._positions.news(self.scheduler.line)))

    def _turn(self, held: Held) -> Turn:
        if self.closed:
            return Turn(self.scheduler.plan(None))
        self._news = False
        plan = self.scheduler.plan(lambda pages, rows: self.lacking(pages, rows, held))
        if plan.admitted:
            self._positions.changed()
        if not plan.wanted_pages:
            return Turn(plan)
        budget, head = self.budget, self.scheduler.head
        assert head is not None, "pages are wanted for the head of the queue"
        pages, places = self.scheduler.footing(head)
        if self._too_large(pages, places):
            refusal = budget.refusal(pages + places * self.row_pages)
            return Turn(plan, budget.withdraw(), (head, refusal))
        resuming = self.scheduler.has_begun(head)
        wish = budget.want(plan.hoped_pages) or budget.want(plan.wanted_pages)  # 1
        if wish is not None or not budget.is_denied(plan.wanted_pages):
            return Turn(plan, replace(wish, resuming=resuming) if wish else None)
        if held.cached:  # 2
            self._news = True
            return Turn(plan, evict_pages=min(held.cached, plan.wanted_pages))
        return Turn(plan, spill=not self.scheduler.places and self.scheduler.kept_behind > 0)  # 3-5

    def give_back(self, pages: int, held: Held) -> MemoryRequested | None:
        """Return what is granted above ``pages``, as far as nothing holds or has reserved it.

        None if there is nothing, or a wish is open. Drop what can go before: cached prefixes,
        spare pools, and rows (`Scheduler.victims`, `park`).
        """
        scheduler = self.scheduler
        needed = self._needed(scheduler.reserved, scheduler.places, held)
        return self.budget.give_back(max(pages, needed))

    def hand_over(self, pages: int, held: Held) -> tuple[MemoryRequested | None, int]:
        """Do the same for the daemon, who asked for it; return the bytes that it gets with it.

        A wish that is open is forgotten.
        """
        scheduler, before = self.scheduler, self.budget.granted_bytes
        needed = self._needed(scheduler.reserved, scheduler.places, held)
        wish = self.budget.hand_over(max(pages, needed))
        if wish is not None:
            self.budget.denied = None
            self._news = True
        return wish, before - self.budget.granted_bytes

    @property
    def _can_rest(self) -> bool:
        budget = self.budget
        above = budget.pages > self._idle_pages or budget.remembered
        return self.idle and budget.open_bytes is None and above

    def rest(self, cached: int = 0) -> MemoryRequested | None:
        """With nobody there, give back what an idle engine does not keep; call `shrink` before.

        ``cached``: pages of cached prefixes, which stay.
        """
        if not self.idle:
            return None
        self._idle_pages = self._rest_pages + cached
        return self.budget.give_back(self._idle_pages) or self.budget.withdraw()
