"""What an engine does while it has no requests: it returns memory, and probes the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.worker.cache.page_store import growth_pages
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.gang.leader import give_back
from kvd.worker.scheduling.admission import Admission
from kvd.worker.serving.bit_choice import Probing
from protocol.pages import FIRST_ROWS, SLAB_PAGES
from protocol.worker import MemoryRequested, Phase


class IdleWork:
    """The idle work of one engine. ``probing``: what a load has left of the probe of layers."""

    def __init__(
        self,
        cache: Any,
        admission: Admission,
        memory: MemoryAccount,
        probing: Probing | None,
        enter_phase: Callable[[Phase], None],
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._memory = memory
        self.probing = probing
        self._enter_phase = enter_phase
        self._is_due = False
        """Whether pools must be cut or begin to grow, and the next idle step will do it."""
        self._grows = False
        """Whether growth of the pools has begun; each idle step grows one piece."""

    @property
    def is_left(self) -> bool:
        """Whether an idle engine has work left."""
        return self._is_due or self._grows or self.probing is not None

    def run(self, *, was_idle: bool) -> MemoryRequested | None:
        """Return memory to the system, grow a piece of the pools, or run a unit of the probe.

        Returns a report that gives memory back to the daemon, if any. ``was_idle``: whether the
        step began without requests. If not, pools are neither cut nor grown, and no layer is
        probed, because a request may arrive soon.
        """
        request = self._return_memory(copies=was_idle)
        if was_idle and not self._grows:
            self._probe()
        return request

    def _return_memory(self, *, copies: bool) -> MemoryRequested | None:
        """Return memory to the daemon, except free pages for the next requests.

        ``copies``: whether pools may be cut or grow, which copies all pages in use. If False and
        that is needed, return None and set `_is_due`.

        After a change of their size, pools keep as many free pages as they grow by
        (`growth_pages`). Large pools are cut only if more than five eighths of the pages in use are
        free: then they have grown more than twice. Otherwise every wave of requests would copy all
        cached pages twice. If the governor has reclaimed memory, pools grow to fewer free pages:
        tails of the first rows have precedence.

        Pools grow here if cached prefixes have filled most of a slab, so that the next request does
        not wait for a copy of all cached pages. They grow piece by piece, because a request may
        come meanwhile.
        """
        cache, admission, memory = self._cache, self._admission, self._memory
        memory.grows_ahead = True
        cached, grammars = memory.cached_pages, memory.grammar_pages
        free = max(0, admission.budget.pages - cached - grammars)
        room = max(0, free - FIRST_ROWS * admission.row_pages)
        used = cache.usage.unbounded_pages_used
        growth = growth_pages(used)
        wanted = min(room, growth)
        # Large pools are not cut for these tails if new checkpoints have taken their memory: a cut
        # copies all pages. If memory is then short for a row, admission has pools cut.
        most = min(free if growth > SLAB_PAGES else room, max(SLAB_PAGES, used * 5 // 8))
        excess = memory.charged_pages > cached + most
        begins = cache.lacks_room(wanted) and not self._grows
        resizes = excess or begins or cache.tail_slots > FIRST_ROWS
        self._is_due = resizes and not copies
        if self._is_due:
            return None
        if resizes:
            self._enter_phase("pools")
            cache.shrink(wanted if excess else most)
            give_back(cache)
        self._grows = cache.lacks_room(wanted)
        if self._grows and copies:
            self._enter_phase("pools")
            cache.make_idle_room(wanted)
        kept = max(cached, memory.charged_pages - min(SLAB_PAGES, room))
        return admission.give_back_idle(kept + grammars)

    def _probe(self) -> None:
        """Run a unit of the probe of layers. Its result is for the next load."""
        if self.probing is None:
            return
        self._enter_phase("prefill")
        self.probing.advance()
        if not self.probing.has_work:
            self.probing = None
            give_back(self._cache)
