"""Counts how much of its grant one engine holds, and how much it could give back.

Amounts are in pages of `PageBudget.page_bytes`, unless a name says bytes. The real engine and the
fake one share this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

from kvd.worker.prefix.cache import PrefixCache, TrackedPrompt
from kvd.worker.scheduling.admission import Admission, Held
from protocol.types import Reclaimable
from protocol.worker import MemoryRequested

MIN_TOKENS_BETWEEN_PREEMPTIONS = 256
"""Tokens that a preempted row generates before it may be preempted again; prevents thrashing."""


class Preemptible(Protocol):
    """The fields of a request that the account reads: the fake engine has its own request class."""

    tracked: TrackedPrompt
    kept_pages: int
    resumed_at: int | None

    @property
    def rid(self) -> str: ...

    @property
    def longest(self) -> int: ...


def can_preempt(request: Preemptible) -> bool:
    """Return whether a request has generated enough tokens since it last resumed."""
    if request.resumed_at is None:
        return True
    return request.longest >= request.resumed_at + MIN_TOKENS_BETWEEN_PREEMPTIONS


class Grammars(Protocol):
    """Compiled grammars, of which nothing is lost but the time to compile them again."""

    @property
    def kept_bytes(self) -> int: ...

    def shrink(self) -> None: ...


class MemoryAccount:
    """The account of one engine.

    ``cache``: `ModelCache` or `MlxLmCache`. ``grammars``: None if the engine compiles none.
    """

    def __init__(
        self,
        cache: Any,
        admission: Admission,
        prefix_cache: PrefixCache,
        requests: Mapping[str, Preemptible],
        grammars: Grammars | None = None,
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._scheduler = admission.scheduler
        self._page_bytes = admission.budget.page_bytes
        self._prefix_cache = prefix_cache
        self._requests = requests
        self._grammars = grammars
        self.grows_ahead = True
        """Whether the engine requests memory for pools before they grow. A reclaim sets it to False
        until the requests that run have ended."""
        self.promised_bytes = 0
        """Bytes that the current reclaim returns. Pools must not grow into them ahead of need."""

    def held(self) -> Held:
        """Return what the engine holds now, and set how far pools may grow ahead of need."""
        cache, budget, page_bytes = self._cache, self._admission.budget, self._page_bytes
        grammars = self.grammar_pages
        pages = budget.pages - grammars
        cache.limit_bytes = pages * page_bytes - self._kept_free() - self.promised_bytes
        filled = self._prefix_cache.filled_bytes // page_bytes
        charged, cached = self.charged_pages + grammars, self.cached_pages + grammars
        return Held(charged, cache.tail_slots, cached, filled)

    def _kept_free(self) -> int:
        """Bytes of the grant that stay free for coming tails and checkpoints, not for pools."""
        prefix_cache, cache = self._prefix_cache, self._cache
        if prefix_cache.tree is None:
            return 0
        slots = cache.tail_slots
        places = max(slots, self._scheduler.reserved_rows)
        kept: int = places * self._admission.row_pages * self._page_bytes - slots * cache.row_bytes
        kept += prefix_cache.wanted_bytes - prefix_cache.filled_bytes
        return kept + self._page_bytes  # other counts are rounded up to whole pages

    def spare_bytes(self) -> int:
        """Return the bytes of the grant that are free and that no admitted row may need."""
        return self._admission.spare_pages(self.held()) * self._page_bytes

    @property
    def charged_pages(self) -> int:
        """Pages that pools and snapshots take."""
        charged: int = self._cache.charged_bytes + self._cache.snapshots.nbytes
        return -(-charged // self._page_bytes)

    @property
    def cached_pages(self) -> int:
        """Pages that only checkpoints take: not snapshots of preempted rows, which are reserved."""
        snapshots: int = -(-self._cache.snapshot_charge // self._page_bytes)
        return max(0, snapshots - self._kept_pages)

    @property
    def grammar_pages(self) -> int:
        """Pages of memory that kept grammars take: not in pools, and freed before checkpoints."""
        return 0 if self._grammars is None else -(-self._grammars.kept_bytes // self._page_bytes)

    def drop_grammars(self) -> int:
        """Drop the compiled grammars; return their pages."""
        pages = self.grammar_pages
        if self._grammars is not None and pages:
            self._grammars.shrink()
        return pages

    @property
    def _kept_pages(self) -> int:
        return sum(request.kept_pages for request in self._requests.values())

    @property
    def needed_pages(self) -> int:
        """Pages that pools and snapshots need in the worst case."""
        return self._scheduler.reserved_pages + self.cached_pages

    def request_spare(self) -> MemoryRequested | None:
        """Request memory for coming checkpoints and for the growth of pools, or for checkpoints.

        Requests are served without it, so no other model gives memory back for it.
        """
        for pages in self._wanted_spare_pages():
            if request := self._admission.request_spare(pages, self.held()):
                return request
        return None

    def _wanted_spare_pages(self) -> Iterator[int]:
        """Yield how many spare pages to request; if that is denied, fewer."""
        if not self._requests:
            return
        wanted = self._prefix_cache.wanted_bytes
        checkpoints = 2 + wanted // self._page_bytes if wanted else 0  # rounded up, and one more
        if self.grows_ahead and self.needed_pages > self.charged_pages:
            growth: int = self._cache.usage.pool_growth_pages
            if growth:
                yield checkpoints + growth
        if checkpoints:
            yield checkpoints

    # What could be given back.

    def reclaimable(self) -> Reclaimable:
        """Return the bytes that each reclaim method would free after the cheaper ones."""
        scheduler, admission, unit = self._scheduler, self._admission, self._page_bytes
        filled = self._prefix_cache.filled_bytes
        places = self._places_pages(scheduler.reserved_rows, filled)
        rows = scheduler.reserved_pages + places
        remaining = [admission.budget.pages, rows + self.cached_pages, rows]
        admitted = scheduler.victims()
        levels = range(1, scheduler.sizes.levels)
        remaining += [rows - self._saving(admitted, level) for level in levels]
        rows -= self._saving(admitted, scheduler.sizes.lowest_level)
        remaining.append(rows - self._freed_by_preemption(admitted, places, filled))
        freed = [unit * max(0, before - after) for before, after in pairwise(remaining)]
        return Reclaimable(
            spare=freed[0],
            prefixes=freed[1],
            levels=tuple(freed[2:-1]),
            preempt=freed[-1],
            rows=len(admitted),
            waiting=scheduler.waiting,
            level=scheduler.start_level,
            base=admission.budget.base_bytes,
        )

    def _places_pages(self, places: int, filled_bytes: int) -> int:
        return places * self._admission.row_pages - filled_bytes // self._page_bytes

    def _saving(self, rids: Iterable[str], level: int) -> int:
        scheduler = self._scheduler
        above = [rid for rid in rids if scheduler.find(rid).level < level]
        return sum(scheduler.step_down_savings(rid, level) for rid in above)

    def _freed_by_preemption(
        self, rids: Iterable[str], places_pages: int, filled_bytes: int
    ) -> int:
        """Return the pages that preemption frees once all rows are at the lowest level."""
        scheduler, lowest = self._scheduler, self._scheduler.sizes.lowest_level
        places, freed = scheduler.reserved_rows, 0
        for request in (self._requests[rid] for rid in rids):
            if can_preempt(request):
                scheduled = scheduler.find(request.rid)
                freed += scheduled.pages - self._saving([request.rid], lowest)
                places -= scheduled.choices
                filled_bytes -= self._prefix_cache.filled_by(request.tracked)
        return freed + self._kept_pages + places_pages - self._places_pages(places, filled_bytes)
