"""Admission of queued requests under the worker's grant. Pure.

The grant covers the reservation of every admitted request (`growth`) until it ends or is preempted.
Memory for a larger reservation of a running request is sought in this order:

1. spare memory of the grant;
2. a larger grant, while the request still has reserved tokens left;
3. once it is stalled and the grant was denied: the pages of cached prefixes
   (`AdmissionResult.evict_pages`), and then those of the least valuable requests, which are
   preempted (`AdmissionResult.stalled`). That may be the stalled request itself.

Then no request is admitted before the running one has its memory. Memory for the head of the queue
is sought in this order:

1. a larger grant for all queued requests for which rows are free, or else for the head alone;
2. if that is denied: the pages of cached prefixes (`AdmissionResult.evict_pages`);
3. pages that requests free when they end or are preempted;
4. if no request is admitted: pages that preempted requests behind the head keep in memory
   (`AdmissionResult.swap_out_kept`);
5. otherwise the head waits. The daemon remembers the denied memory request and grants it when other
   workers give memory back.

A request is refused only if what it was promised exceeds the whole budget at the lowest precision
level: when it is submitted, or when the budget becomes smaller.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.queue_positions import QueuePositions
from kvd.worker.scheduling.request import ScheduledRequest
from kvd.worker.scheduling.scheduler import Plan, Scheduler
from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested, RowQueued


@dataclass(frozen=True)
class Held:
    """What the engine holds now, used or not."""

    pages: int = 0
    """Pages that pools and snapshots take."""
    rows: int = 0
    """Rows with tail buffers."""
    cached: int = 0
    """Pages that only cached prefixes use; they can be evicted at any time."""
    covered: int = 0
    """Cached pages that the ``row_pages`` of admitted rows already cover: one checkpoint each."""


@dataclass(frozen=True)
class AdmissionResult:
    """A plan, and what to report to the daemon and the clients."""

    plan: Plan
    memory_request: MemoryRequested | None = None
    refused: tuple[str, InsufficientMemory] | None = None
    """A request that can never run or continue. It stays scheduled until `Admission.finish`."""
    evict_pages: int = 0
    """Pages of cached prefixes to evict before `Admission.admit` is called again."""
    swap_out_kept: bool = False
    """Whether pages that preempted requests keep must leave memory, because the head needs them."""
    stalled: str | None = None
    """A request that cannot continue unless requests are preempted: it lacks
    `Plan.missing_pages`."""
    queue_positions: tuple[RowQueued, ...] = ()


class Admission:
    """The scheduler and the budget of one engine.

    ``row_pages``: pages that one row takes in addition to the scheduler's: its tail and a
    checkpoint. ``idle_pages``: pages of the grant that an idle engine keeps.
    """

    def __init__(
        self, scheduler: Scheduler, budget: PageBudget, *, row_pages: int, idle_pages: int
    ) -> None:
        self.scheduler = scheduler
        self.budget = budget
        self.row_pages = row_pages
        self._base_idle_pages = idle_pages
        self._idle_pages = idle_pages
        """Pages that the idle engine keeps, cached prefixes included."""
        self._changed = False
        """Whether the next plan may differ from the last one."""
        self.closed = False
        """Whether no request is admitted because memory is being given back."""
        self._positions = QueuePositions()
        self.set_start_level(0)

    def set_start_level(self, level: int) -> None:
        """Start new requests at this level, or at the first lower one that fits into the budget."""
        lowest = self.scheduler.sizes.lowest_level
        self.scheduler.set_start_level(max(0, min(level, lowest)), self._too_large)
        self._changed = True

    def _too_large(self, pages: int, rows: int) -> bool:
        return self.budget.too_large(pages + rows * self.row_pages)

    @property
    def has_work(self) -> bool:
        """Whether `admit` or `give_back_idle` would do something now."""
        return bool(
            self.scheduler.states.active
            or self.may_admit
            or self._may_grow
            or self._reports_positions
            or self._can_give_back_idle
        )

    @property
    def may_admit(self) -> bool:
        """Whether `admit` may admit a queued request; False if it has just failed to."""
        return self.scheduler.waiting > 0 and self._changed and not self.closed

    @property
    def _may_grow(self) -> bool:
        """Whether `admit` can do something for a stalled request now."""
        may_ask = not self.closed and self.budget.open_bytes is None
        return may_ask and self.scheduler.states.stalled

    @property
    def _reports_positions(self) -> bool:
        # Not while a memory request is open, because its answer may change the queue.
        return self._positions.stale and self.budget.open_bytes is None

    @property
    def idle(self) -> bool:
        return not self.scheduler.states.requests

    # Requests: the scheduler's operations, after which a plan may differ.

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
        open_ended: bool = False,
        generated: int = 0,
    ) -> None:
        """Queue a request: see `Scheduler.submit`.

        Raises `InsufficientMemory` if the budget never suffices for what is promised to it.
        """
        sizes = self.scheduler.sizes
        promised = self.scheduler.promised(max_new, open_ended=open_ended)
        first, further = sizes.of(prompt_len, promised, sizes.lowest_level)
        pages = first + (choices - 1) * further
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
            open_ended=open_ended,
            generated=generated,
        )
        self._positions.stale = True
        head = self.scheduler.head
        if head is not None and head.rid == rid:  # behind another request it has to wait anyway
            self._changed = True

    def finish(self, rid: str) -> None:
        """Forget a request in any state. Its pages must not be read any more."""
        self.scheduler.finish(rid)
        self._positions.forget(rid)
        self._note_freed()

    def finish_choice(self, rid: str) -> None:
        self.scheduler.states.remove_choice(rid)
        self._note_freed()

    def preempt(self, rid: str, kept_pages: int = 0) -> None:
        """Take a request out of the batch. Only its kept pages may be read afterwards."""
        self.scheduler.preempt(rid, kept_pages)
        self._note_freed()

    def reduce_kept(self, rid: str, kept_pages: int) -> None:
        self.scheduler.states.reduce_kept(rid, kept_pages)
        self._note_freed()

    def requeue_preempted(self, rid: str) -> None:
        self.scheduler.states.requeue_preempted(rid)
        self._positions.stale = True
        self._changed = True

    def step_down(self, rid: str, level: int) -> None:
        self.scheduler.step_down(rid, level)
        self._note_freed()

    def _note_freed(self) -> None:
        self.budget.note_freed()
        self._changed = True

    # Memory.

    def granted(self, grant: Grant) -> None:
        before = self.budget.limit_bytes
        self.budget.answer(grant)
        if self.budget.limit_bytes != before:
            self.set_start_level(self.scheduler.start_level)
        self._changed = True

    def missing_pages(self, pages: int, rows: int, held: Held) -> int:
        """Return the pages that the grant lacks to reserve this many pages and rows."""
        return self._needed(pages, rows, held) - self.budget.pages

    def spare_pages(self, held: Held) -> int:
        """Return the pages of the grant that are neither held nor reserved."""
        return self.budget.pages - self._needed_now(held)

    def request_spare(self, pages: int, held: Held) -> MemoryRequested | None:
        """Request memory for this many spare pages; None if there are as many, or if denied."""
        return self.budget.request(pages - self.spare_pages(held), spare=True)

    def _needed(self, pages: int, rows: int, held: Held) -> int:
        for_rows = max(held.rows, rows) * self.row_pages - held.covered
        return max(held.pages, pages + held.cached) + for_rows

    def _needed_now(self, held: Held) -> int:
        return self._needed(self.scheduler.reserved_pages, self.scheduler.reserved_rows, held)

    def admit(self, held: Held) -> AdmissionResult:
        """Admit the requests that fit; for the head, seek memory in the order given above."""
        result = self._admit(held)
        if not self._reports_positions:
            return result
        updates = self._positions.updates(self.scheduler.queue)
        return replace_fields(result, queue_positions=tuple(updates))

    def _admit(self, held: Held) -> AdmissionResult:
        if self.closed:
            return AdmissionResult(self.scheduler.plan(None))
        self._changed = False
        scheduler = self.scheduler
        outgrown = scheduler.growth.outgrown
        if outgrown is not None:
            return AdmissionResult(scheduler.plan(None), refused=self._refusal(outgrown))
        plan = scheduler.plan(lambda pages, rows: self.missing_pages(pages, rows, held))
        if plan.admitted:
            self._positions.stale = True
        if not plan.missing_pages:
            return AdmissionResult(plan)
        if plan.growing is not None:
            return self._seek_for_growth(plan, scheduler.find(plan.growing), held)
        assert scheduler.head is not None, "the head lacks the missing pages"
        return self._seek_for_head(plan, scheduler.head, held)

    def _seek_for_growth(
        self, plan: Plan, request: ScheduledRequest, held: Held
    ) -> AdmissionResult:
        asked = self._request(plan, resuming=True)
        if asked is not None or not self.budget.is_denied(plan.missing_pages):
            return AdmissionResult(plan, asked)
        if not request.stalled:
            return AdmissionResult(plan)  # there is time until it needs the memory
        if held.cached:
            return self._evict(plan, held)
        return AdmissionResult(plan, stalled=request.rid)

    def _seek_for_head(self, plan: Plan, head: ScheduledRequest, held: Held) -> AdmissionResult:
        scheduler = self.scheduler
        if not scheduler.growth.fits(head, head.least_new, head.level):
            return AdmissionResult(plan, self.budget.withdraw(), self._refusal(head))
        asked = self._request(plan, resuming=head.was_admitted)  # 1
        if asked is not None or not self.budget.is_denied(plan.missing_pages):
            return AdmissionResult(plan, asked)
        if held.cached:  # 2
            return self._evict(plan, held)
        states = scheduler.states
        return AdmissionResult(plan, swap_out_kept=not states.rows and states.kept_behind_head > 0)

    def _request(self, plan: Plan, *, resuming: bool) -> MemoryRequested | None:
        budget = self.budget
        asked = budget.request(plan.queue_missing_pages) or budget.request(plan.missing_pages)
        return None if asked is None else replace(asked, resuming=resuming)

    def _evict(self, plan: Plan, held: Held) -> AdmissionResult:
        self._changed = True
        return AdmissionResult(plan, evict_pages=min(held.cached, plan.missing_pages))

    def _refusal(self, request: ScheduledRequest) -> tuple[str, InsufficientMemory]:
        pages = self.scheduler.growth.pages(request, request.least_new, request.level)
        return request.rid, self.budget.refusal(pages + request.choices * self.row_pages)

    def give_back(self, pages: int, held: Held) -> tuple[MemoryRequested | None, int]:
        """Give back the grant beyond ``pages``, as far as it is neither held nor reserved.

        Return the memory request and the freed bytes; None and 0 if there are none. An open memory
        request is replaced. The caller first frees cached prefixes, spare pools and rows.
        """
        before = self.budget.granted_bytes
        request = self.budget.give_back(max(pages, self._needed_now(held)))
        if request is not None:
            self._note_freed()
        return request, before - self.budget.granted_bytes

    @property
    def _can_give_back_idle(self) -> bool:
        budget = self.budget
        excess = budget.pages > self._idle_pages or budget.remembered
        return self.idle and budget.open_bytes is None and excess

    def give_back_idle(self, kept: int = 0) -> MemoryRequested | None:
        """If there are no requests, give back what an idle engine does not keep.

        Shrink the pools before this call. ``kept``: pages that stay besides those of an engine
        without cached prefixes.
        """
        if self.idle:
            self._idle_pages = self._base_idle_pages + kept
        if not self._can_give_back_idle:
            return None
        return self.budget.give_back(self._idle_pages) or self.budget.withdraw()
