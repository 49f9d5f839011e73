"""What one engine holds of its grant, and what it could give back: counted, not measured.

The unit is the budget's page. Shared by the real engine and the fake one.

Does not cover: who gets it (`admission`), and how it is given back (`reclaiming`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvd.worker.scheduling.admission import Admission, Held
from protocol.types import Reclaimable

if TYPE_CHECKING:
    from kvd.worker.core.prompts import Prompts
    from kvd.worker.core.request import Request

AGAIN_TOKENS = 256
"""What a row that was parked makes before it is parked again: no ping-pong."""


def can_preempt(request: Request) -> bool:
    """Return whether a request may be parked now."""
    return request.resumed_at is None or request.longest >= request.resumed_at + AGAIN_TOKENS


class Holdings:
    """The account of one engine. ``cache``: `ModelCache` or `MlxLmCache`."""

    def __init__(
        self,
        cache: Any,
        admission: Admission,
        prompts: Prompts,
        requests: Mapping[str, Request],
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._scheduler = admission.scheduler
        self._prompts = prompts
        self._requests = requests
        self.promised = 0
        """Bytes that are about to be given back: pools do not grow ahead of need into them."""

    @property
    def _unit(self) -> int:
        return self._admission.budget.page_bytes

    def held(self) -> Held:
        """Return what is held now; pools may grow ahead of need as far as that leaves room."""
        cache, budget = self._cache, self._admission.budget
        cache.limit_bytes = budget.pages * self._unit - self._kept_free() - self.promised
        left = self._prompts.left_bytes // self._unit
        return Held(self.charged_pages, cache.tail_slots, self.cached_pages, left)

    def _kept_free(self) -> int:
        """Bytes of the grant that places have for tails and checkpoints to come, not for pools."""
        remembered, cache = self._prompts.remembered, self._cache
        if remembered is None:
            return 0
        slots = cache.tail_slots
        places = max(slots, self._scheduler.places)
        kept: int = places * self._admission.row_pages * self._unit - slots * cache.row_bytes
        kept += remembered.claimed - remembered.left_bytes
        return kept + self._unit  # all is counted in whole pages elsewhere

    def spare_bytes(self) -> int:
        """Bytes of the grant that nobody holds and no place may come to need."""
        return self._admission.spare(self.held()) * self._unit

    @property
    def charged_pages(self) -> int:
        """What pools and frozen rows take."""
        charged: int = self._cache.charged_bytes + self._cache.snapshot_bytes
        return -(-charged // self._unit)

    @property
    def cached_pages(self) -> int:
        """Of these, what only checkpoints of prompts take; parked rows have reserved theirs."""
        snapshot: int = -(-self._cache.snapshot_charge // self._unit)
        return max(0, snapshot - sum(one.kept_pages for one in self._requests.values()))

    @property
    def needed_pages(self) -> int:
        """What pools and frozen rows must have in the worst case."""
        return self._scheduler.reserved + self.cached_pages

    # What could be given back.

    def reclaimable(self) -> Reclaimable:
        """Return what each means would free on top of those before it."""
        scheduler, admission, unit = self._scheduler, self._admission, self._unit
        left = self._prompts.left_bytes
        places = self._places_pages(scheduler.places, left)
        rows = scheduler.reserved + places
        marks = [admission.budget.pages, rows + self.cached_pages, rows]
        admitted = scheduler.victims()
        levels = range(1, scheduler.sizes.levels)
        marks += [rows - self._saving(admitted, level) for level in levels]
        rows -= self._saving(admitted, scheduler.sizes.lowest)
        marks.append(rows - self._preemption(admitted, places, left))
        steps = [unit * max(0, one - next_) for one, next_ in pairwise(marks)]
        return Reclaimable(
            spare=steps[0],
            prefixes=steps[1],
            levels=tuple(steps[2:-1]),
            preempt=steps[-1],
            rows=len(admitted),
            waiting=scheduler.waiting,
            level=scheduler.start_level,
            base=admission.budget.base_bytes,
        )

    def _places_pages(self, places: int, left_bytes: int) -> int:
        return places * self._admission.row_pages - left_bytes // self._unit

    def _saving(self, rids: Iterable[str], level: int) -> int:
        scheduler = self._scheduler
        return sum(scheduler.saving(one, level) for one in rids if scheduler.level(one) < level)

    def _preemption(self, rids: Iterable[str], places_pages: int, left_bytes: int) -> int:
        """Return the pages that parking frees, of who stands on the lowest level or goes there."""
        scheduler, lowest = self._scheduler, self._scheduler.sizes.lowest
        places, freed = scheduler.places, 0
        for request in (self._requests[rid] for rid in rids):
            if can_preempt(request):
                pages, choices = scheduler.footing(request.rid)
                if scheduler.level(request.rid) < lowest:
                    pages -= scheduler.saving(request.rid, lowest)
                places -= choices
                left_bytes -= self._prompts.left_by(request)
                freed += pages
        kept = sum(one.kept_pages for one in self._requests.values())
        return freed + kept + places_pages - self._places_pages(places, left_bytes)
