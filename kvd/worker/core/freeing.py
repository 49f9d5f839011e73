"""Frees grammars, checkpoints, tails and free pages for requests that lack pages."""

from __future__ import annotations

from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.reclaiming import Reclaiming
from kvd.worker.scheduling.scheduler import Plan
from protocol.pages import SLAB_PAGES


class Freeing:
    """Frees memory of one engine."""

    def __init__(self, batch: Batch, memory: MemoryAccount, reclaiming: Reclaiming) -> None:
        self._batch = batch
        self._cache = batch.runner.cache
        self._memory = memory
        self._reclaiming = reclaiming

    def evict(self, pages: int) -> bool:
        """Drop compiled grammars and then checkpoints; return whether that freed memory.

        ``pages``: approximate number of pages to free.
        """
        dropped = self._memory.drop_grammars()
        wanted = (pages - dropped) * self._batch.admission.budget.page_bytes
        if wanted <= 0 or not self._batch.prefix_cache.evict(wanted):
            return dropped > 0
        self._batch.synchronize()
        self._batch.enter_phase("pools")
        self._cache.compact(self._memory.needed_pages)
        return True

    def cut_pools(self, plan: Plan) -> bool:
        """If ``plan`` lacks pages and a cut is allowed, cut pools to what rows have reserved.

        Return whether that freed memory.
        """
        return self._may_cut_pools(plan.missing_pages) and self._free_spare_pools(plan.growing)

    def _may_cut_pools(self, missing: int) -> bool:
        """Return whether pools may be cut to supply ``missing`` pages.

        A cut copies all pages in use, and so does growing again once the memory is granted. With
        more than a slab in use, the daemon must have refused the memory first.
        """
        if self._cache.usage.pages_used <= SLAB_PAGES:
            return missing > 0
        return missing > 0 and self._batch.admission.budget.is_denied(missing)

    def _free_spare_pools(self, growing: str | None) -> bool:
        """Shrink pools to what rows have reserved; return whether that freed memory.

        They are shrunk only if they exceed what is needed with ``growing`` extended, or else with
        the head of the queue admitted: otherwise nothing is gained, and the pools would have to
        grow again. With no rows left, the tail buffers are freed as well, because the head may need
        that memory for pages.
        """
        cache = self._cache
        if not cache.sequences and cache.tail_slots and not self._reclaiming.active:
            self._batch.enter_phase("pools")
            cache.shrink()
            return True
        needed = self._memory.needed_pages
        scheduler = self._batch.scheduler
        if growing is not None:
            wanted = scheduler.growth.extra_pages(scheduler.find(growing))
        else:
            wanted = scheduler.head.missing_pages if scheduler.head else 0
        if self._reclaiming.active or self._memory.charged_pages <= needed + wanted:
            return False
        self._batch.synchronize()
        self._batch.enter_phase("pools")
        freed: int = cache.compact(needed)
        return freed > 0
