"""Returns memory to the daemon by the method that it asks for, piece by piece between decode steps.

::

    Reclaim --> drop checkpoints, step rows down, or preempt rows
                --> shrink the pools to what is used
                    --> MemoryRequested with a smaller total --> Reclaimed

No request is admitted meanwhile, so that the memory goes to the daemon and not to the queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.pages import PageId
from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.request import Request
from kvd.worker.gang.leader import give_back
from protocol.worker import Reclaim, Reclaimed

MIN_WORK_SECONDS = 0.010
"""Seconds that each step works on returning memory, at least."""
STEP_SHARE = 0.1
"""Share of a step's duration for this work, if that exceeds the minimum: some steps prefill."""
_TRIM_ROUNDS = 3
"""Rounds of shrinking the pools: flushes between two rounds may make them grow again."""


class Reclaiming:
    """The reclaims of one engine. Call `add`, then `advance` in each step while `active`."""

    def __init__(self, batch: Batch, memory: MemoryAccount, preemption: Preemption) -> None:
        self._batch = batch
        self._memory = memory
        self._preemption = preemption
        self._commands: deque[Reclaim] = deque()
        self._work: Iterator[None] | None = None
        self._work_until = 0.0
        self._last_worked_at: float | None = None
        """When the previous step ended its work on the same command."""

    @property
    def active(self) -> bool:
        return bool(self._commands)

    def add(self, command: Reclaim) -> None:
        self._commands.append(command)

    def abandon(self) -> None:
        """Answer all commands with nothing freed, after a failed step."""
        self._batch.reports += [
            Reclaimed(seq=command.seq, freed_bytes=0, exhausted=False) for command in self._commands
        ]
        self._commands.clear()
        if self._work is not None:
            self._finish()

    def advance(self) -> None:
        """Work on the first command for a while; report when it is done. The device is idle."""
        command = self._commands[0]
        if self._work is None:
            self._batch.admission.closed = True
            self._preemption.note_reclaim(active=True)
            self._memory.promised_bytes = command.wanted_bytes
            self._memory.grows_ahead = False
            self._work = self._reclaim(command)
        now = time.monotonic()
        step_seconds = 0.0 if self._last_worked_at is None else now - self._last_worked_at
        self._work_until = now + max(MIN_WORK_SECONDS, STEP_SHARE * step_seconds)
        while next(self._work, self) is None:
            if self._seconds_left() <= 0:
                self._last_worked_at = time.monotonic()
                return
        self._commands.popleft()
        self._return_memory(command)
        self._preemption.requeue()
        self._finish()

    def _finish(self) -> None:
        self._work = self._last_worked_at = None
        self._preemption.note_reclaim(active=False)
        self._batch.admission.closed = False
        self._memory.promised_bytes = 0

    def _return_memory(self, command: Reclaim) -> None:
        admission, reports = self._batch.admission, self._batch.reports
        least = max(0, admission.budget.pages - self._pages_of(command.wanted_bytes))
        request, freed = admission.give_back(least, self._memory.held())
        give_back(self._batch.cache)
        reclaimable = self._memory.reclaimable()
        if request is not None:
            reports.append(replace(request, reclaimable=reclaimable))
        remaining = {
            "spare": reclaimable.spare,
            "prefixes": reclaimable.prefixes,
            "precision": sum(reclaimable.levels[: command.level]),
            "preempt": reclaimable.preempt,
        }
        exhausted = remaining[command.method] == 0
        reports.append(Reclaimed(seq=command.seq, freed_bytes=freed, exhausted=exhausted))

    def _pages_of(self, nbytes: int) -> int:
        return -(-nbytes // self._batch.admission.budget.page_bytes)

    def _seconds_left(self) -> float:
        return self._work_until - time.monotonic()

    # The work on one command. At each yield, the rest may be left to the next step.

    def _reclaim(self, command: Reclaim) -> Iterator[None]:
        while self._preemption.delays_reclaim:
            self._preemption.work(self._seconds_left())
            yield
        self._batch.admission.closed = True  # the end of a transfer may have opened it
        if self._memory.spare_bytes() < command.wanted_bytes:
            self._memory.drop_grammars()
        match command.method:
            case "prefixes":
                self._batch.prefix_cache.evict(command.wanted_bytes, "reclaim")
            case "precision":
                yield from self._step_down(command)
            case "preempt":
                yield from self._preemption.reclaim(command.wanted_bytes)
        yield from self._trim(command.wanted_bytes)

    def _step_down(self, command: Reclaim) -> Iterator[None]:
        """Step down as many requests as it takes, the least valuable first.

        New requests start at the same level.
        """
        batch, cache = self._batch, self._batch.cache
        level = min(command.level, batch.scheduler.sizes.lowest_level)
        batch.admission.set_start_level(max(level, batch.scheduler.start_level))
        if isinstance(cache, MlxLmCache):
            return
        chosen = self._choose(level, command.wanted_bytes)
        for request in chosen:
            batch.step_down(request, level)
        # Before the conversion, because a prompt that begins during it must not continue from pages
        # that are being converted.
        pages = _pages_of(row for request in chosen for row in request.kept)
        batch.prefix_cache.drop_lowered(lambda it: not pages.isdisjoint(_pages_of([it])))
        while above := self._rows_above(cache, level, chosen):
            batch.synchronize()
            work = batch.runner.step_down(above, level)
            while not work.over:
                work.advance(self._seconds_left(), time.monotonic)
                yield
        for request in chosen:
            if batch.holds(request):
                batch.admission.step_down(request.rid, level)
                self._preemption.rows.recount(request)

    def _choose(self, level: int, wanted_bytes: int) -> list[Request]:
        """Return the requests to step down, each with all requests that share pages with it.

        A shared page is converted once, so all its requests are at the lower level then. These
        include preempted requests, and those whose read from the prefix store has not begun.
        """
        batch, chosen = self._batch, []
        admitted = batch.scheduler.victims()
        reading = batch.transfers.reading
        groups = sharing(
            (request, [*request.kept, *(reading[rid].sequences if rid in reading else ())])
            for rid, request in batch.requests.items()
        )
        for first in admitted:
            if wanted_bytes <= 0:
                break
            for request in groups[first]:
                if request in chosen or batch.scheduler.find(request.rid).level >= level:
                    continue
                chosen.append(request)
                if request.rid in admitted:
                    saved_pages = batch.scheduler.step_down_savings(request.rid, level)
                    wanted_bytes -= saved_pages * batch.admission.budget.page_bytes
        return chosen

    def _rows_above(self, cache: Any, level: int, requests: list[Request]) -> list[Any]:
        """Return the requests' rows and snapshots with a tail or a page above a precision level."""
        lowest = cache.settings.store_level(level)
        present = [request for request in requests if self._batch.holds(request)]
        return [
            row
            for request in present
            for row in request.kept
            if any(part.level < lowest for one in row.rows for part in (one, *one.pages))
        ]

    def _trim(self, wanted_bytes: int) -> Iterator[None]:
        """Shrink tails and pools to what is used, if they hold the memory that is wanted."""
        batch, cache = self._batch, self._batch.cache
        wanted = self._pages_of(wanted_bytes)
        if not self._must_trim(wanted):
            return
        if cache.tail_slots > batch.scheduler.reserved_rows:
            batch.finish_step()
            cache.cut_tails()
        for _ in range(_TRIM_ROUNDS):
            if not self._must_trim(wanted) or isinstance(cache, MlxLmCache):
                return
            batch.synchronize()
            trimming = batch.runner.trim_pools()
            while not trimming.over:
                trimming.advance(self._seconds_left(), time.monotonic)
                yield

    def _must_trim(self, wanted: int) -> bool:
        """Return whether fewer pages than wanted are free, and trimming would free some."""
        held, admission = self._memory.held(), self._batch.admission
        places = self._batch.scheduler.reserved_rows
        excess = held.pages > self._memory.needed_pages or held.rows > places
        return excess and admission.spare_pages(held) < wanted


def sharing(held: Iterable[tuple[Request, Sequence[Any]]]) -> dict[str, list[Request]]:
    """Return the requests that share pages with each one, directly or through others.

    ``held``: requests with their rows and snapshots. The key is a request's id; each list has the
    request itself.
    """
    groups: dict[str, list[Request]] = {}
    holders: dict[tuple[int, PageId], str] = {}
    for request, rows in held:
        groups[request.rid] = mine = [request]
        for page in _pages_of(rows):
            other = groups[holders.setdefault(page, request.rid)]
            if other is not mine:
                other += mine
                groups.update((member.rid, other) for member in mine)
                mine = other
    return groups


def _pages_of(rows: Iterable[Any]) -> set[tuple[int, PageId]]:
    """Return the pages of rows and snapshots, by store and page."""
    parts = [(store, part) for row in rows for store, part in enumerate(row.rows)]
    return {(store, page) for store, part in parts for page in part.pages}
