"""Giving memory back to the daemon, by the means that it asks for, in slices beside decoding.

::

    Reclaim --> act: drop checkpoints, step rows down, or park rows    a slice between two steps
                --> cut the pools to what is used                      a slice between two steps
                    --> MemoryRequested, with less than before --> Reclaimed

While it works nobody is admitted, so what comes free goes to the daemon and not to the queue.

Does not cover: what could be given back (`holdings`), where parked rows go (`parking`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from msgspec.structs import replace

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.model_step_down import ModelStepDown, PoolTrimming
from kvd.worker.process import memory
from protocol.worker import MemoryRequested, Reclaim, Reclaimed, Report

if TYPE_CHECKING:
    from kvd.worker.core.hands import Hands
    from kvd.worker.core.preemption import Preemption
    from kvd.worker.core.request import Request

SLICE_SECONDS = 0.010
"""How long a step works on giving memory back, at least."""
SHARE = 0.1
"""Of a step's own time, which is more where prompts are read: somebody waits for the memory."""
_TRIES = 3
"""Times that pools are cut: what is flushed meanwhile may make them grow again."""


class Reclaiming:
    """What one engine does for the governor. `ask`, then `advance` once a step."""

    def __init__(self, hands: Hands, parking: Preemption, clock: Callable[[], float]) -> None:
        self._hands = hands
        self._preemption = parking
        self._clock = clock
        self._asked: deque[Reclaim] = deque()
        self._now: Iterator[None] | None = None
        self._end = 0.0
        """Of the slice."""
        self._over_at: float | None = None
        """When the last slice of this command was."""

    @property
    def active(self) -> bool:
        """Whether there is something to give back."""
        return bool(self._asked)

    def ask(self, command: Reclaim) -> None:
        """Give back what a command says, when those before it are over."""
        self._asked.append(command)

    def abandon(self) -> list[Report]:
        """Give up what is under way, after a step that failed; return the answers."""
        reports: list[Report] = [
            Reclaimed(seq=one.seq, freed_bytes=0, exhausted=False) for one in self._asked
        ]
        self._asked.clear()
        if self._now is not None:
            self._open()
        return reports

    def advance(self) -> list[Report]:
        """Work for a slice; return the answer of what is over now. The device must be idle."""
        command = self._asked[0]
        if self._now is None:
            self._hands.admission.closed = True
            self._hands.memory_account.promised_bytes = command.wanted_bytes
            self._now = self._work(command)
        now = self._clock()
        step = 0.0 if self._over_at is None else now - self._over_at
        self._end = now + max(SLICE_SECONDS, SHARE * step)
        while next(self._now, self) is None:
            if not self._has_time():
                self._over_at = self._clock()
                return []
        self._asked.popleft()
        reports = self._give_back(command)
        self._preemption.requeue()
        self._open()
        return reports

    def _open(self) -> None:
        self._now = self._over_at = None
        self._hands.admission.closed = False
        self._hands.memory_account.promised_bytes = 0

    def _give_back(self, command: Reclaim) -> list[Report]:
        hands = self._hands
        unit = hands.admission.budget.page_bytes
        wanted = -(-command.wanted_bytes // unit)
        least = max(0, hands.admission.budget.pages - wanted)
        wish, freed = hands.admission.give_back(least, hands.memory_account.held())
        mx.clear_cache()
        memory.trim_malloc()  # what malloc keeps of it: the process must hold less, not only MLX
        reclaimable = hands.memory_account.reclaimable()
        rest = {
            "spare": reclaimable.spare,
            "prefixes": reclaimable.prefixes,
            "precision": sum(reclaimable.levels[: command.level]),
            "preempt": reclaimable.preempt,
        }
        over = Reclaimed(seq=command.seq, freed_bytes=freed, exhausted=rest[command.method] == 0)
        given: list[MemoryRequested] = (
            [] if wish is None else [replace(wish, reclaimable=reclaimable)]
        )
        return [*given, over]

    # The work. Each yield is a place where a slice may end.

    def _work(self, command: Reclaim) -> Iterator[None]:
        while self._preemption.busy:
            self._preemption.work(self._left())
            yield
        self._hands.admission.closed = True  # what was under way there may have opened it
        match command.method:
            case "spare":
                pass
            case "prefixes":
                self._hands.prefix_cache.evict(command.wanted_bytes)
            case "precision":
                yield from self._lower(command)
            case "preempt":
                yield from self._preemption.reclaim(command.wanted_bytes)
        yield from self._trim(command.wanted_bytes)

    def _has_time(self) -> bool:
        return self._clock() < self._end

    def _left(self) -> float:
        return self._end - self._clock()

    def _lower(self, command: Reclaim) -> Iterator[None]:
        """Step rows down, the least valuable first, until it is enough."""
        hands, cache = self._hands, self._hands.cache
        level = min(command.level, hands.scheduler.sizes.lowest_level)
        hands.admission.set_start_level(max(level, hands.scheduler.start_level))
        if not isinstance(cache, ModelCache):
            return
        chosen = self._chosen(level, command.wanted_bytes)
        for request in chosen:
            request.level = max(request.level, level)
            request.over.record_level(request.level)
            request.tracked.lowered = True
            request.mixed = request.mixed or request.begun or request.row is not None
        while above := [row for row in self._rows(chosen) if _is_above(cache, row, level)]:
            hands.drain()
            lowering = ModelStepDown(cache, above, level)
            while not lowering.over:
                lowering.advance(self._left(), self._clock)
                yield
        hands.prefix_cache.drop_lowered()
        for request in self._present(chosen):
            hands.admission.step_down(request.rid, level)

    def _chosen(self, level: int, wanted_bytes: int) -> list[Request]:
        hands = self._hands
        unit, chosen = hands.admission.budget.page_bytes, []
        for rid in hands.scheduler.victims():
            if wanted_bytes <= 0:
                break
            if hands.scheduler.find(rid).level < level:
                wanted_bytes -= hands.scheduler.step_down_savings(rid, level) * unit
                chosen.append(hands.requests[rid])
        return chosen

    def _present(self, requests: list[Request]) -> list[Request]:
        there = self._hands.requests
        return [one for one in requests if there.get(one.rid) is one]

    def _rows(self, requests: list[Request]) -> list[Any]:
        there = self._present(requests)
        rows = [one.row for one in there] + [
            one.row for request in there for one in request.completions
        ]
        return [row for row in rows if row is not None]

    def _trim(self, wanted_bytes: int) -> Iterator[None]:
        """Cut tails and pools to what is used, if they hold what is wanted."""
        hands, cache = self._hands, self._hands.cache
        wanted = -(-wanted_bytes // hands.admission.budget.page_bytes)
        if not self._lacks(wanted):
            return
        if cache.tail_slots > hands.scheduler.reserved_rows:
            hands.settle()
            hands.drain()
            cache.cut_tails()
        for _ in range(_TRIES):
            if not self._lacks(wanted) or not isinstance(cache, ModelCache):
                return
            hands.drain()
            trimming = PoolTrimming(cache)
            while not trimming.over:
                trimming.advance(self._left(), self._clock)
                yield

    def _lacks(self, wanted: int) -> bool:
        """Return whether less can be given back than wanted, and cutting would help."""
        hands = self._hands
        memory_account, held = hands.memory_account, hands.memory_account.held()
        loose = (
            held.pages > memory_account.needed_pages or held.rows > hands.scheduler.reserved_rows
        )
        return loose and hands.admission.spare_pages(held) < wanted


def _is_above(cache: ModelCache, row: Any, level: int) -> bool:
    lowest = cache.settings.store_level(level)
    return any(
        one.level < lowest or any(page.level < lowest for page in one.pages) for one in row.rows
    )
