"""What the fake engine does for the governor: the same words and numbers as the real one, at once.

Its pages are smaller on lower levels, as the bits of the ladder's schemes are. Rows that are parked
lose nothing: their tokens are a function of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvd.worker.cache.scheme import full_pages
from kvd.worker.core.memory_account import MemoryAccount, can_preempt
from kvd.worker.scheduling.admission import Admission, Held
from kvd.worker.scheduling.scheduler import ReservationSizes
from protocol.types import KVSpec, Reclaimable
from protocol.worker import Reclaim, Reclaimed, Report, RowPreempted, RowResumed

if TYPE_CHECKING:
    from kvd.worker.prefix.cache import PrefixCache
    from protocol.worker import PreemptionMode


def sizes_of(kv: KVSpec) -> ReservationSizes:
    """Return how many pages rows take, by level."""
    bits = [scheme.k_bits + scheme.v_bits for scheme in (kv.scheme, *kv.steps)]
    return ReservationSizes(
        lambda length, level: -(-full_pages(length) * bits[level] // bits[0]), levels=len(bits)
    )


@dataclass
class _Cache:
    """The only property of a cache that the fake engine's `MemoryAccount` reads."""

    prefix_cache: PrefixCache

    @property
    def snapshot_charge(self) -> int:
        """Bytes that only checkpoints hold."""
        tree = self.prefix_cache.tree
        return 0 if tree is None else tree.freeable_bytes


class FakeReclaiming:
    """The fake engine's rows under pressure. ``where``: rows are parked."""

    def __init__(
        self,
        admission: Admission,
        prefix_cache: PrefixCache,
        rows: Mapping[str, Any],
        where: PreemptionMode,
        report: Callable[[Report], None],
    ) -> None:
        self._admission = admission
        self._prefix_cache = prefix_cache
        self._rows = rows
        self._where = where
        self._report = report
        self._memory = MemoryAccount(_Cache(prefix_cache), admission, prefix_cache, rows)

    @property
    def cached_pages(self) -> int:
        """Pages that only checkpoints hold."""
        return self._memory.cached_pages

    def reclaimable(self) -> Reclaimable:
        """Return what could be given back."""
        return self._memory.reclaimable()

    def reclaim(self, command: Reclaim) -> None:
        """Give memory back by one means."""
        unit = self._admission.budget.page_bytes
        preempted: list[str] = []
        match command.method:
            case "spare":
                pass
            case "prefixes":
                self._prefix_cache.evict(command.wanted_bytes)
            case "precision":
                self._lower(command.level, command.wanted_bytes)
            case "preempt":
                preempted = self._park(command.wanted_bytes)
        held = Held(cached=self.cached_pages)
        least = max(0, self._admission.budget.pages - -(-command.wanted_bytes // unit))
        wish, freed = self._admission.give_back(least, held)
        reclaimable = self.reclaimable()
        if wish is not None:
            self._report(replace(wish, reclaimable=reclaimable))
        rest = {
            "spare": reclaimable.spare,
            "prefixes": reclaimable.prefixes,
            "precision": sum(reclaimable.levels[: command.level]),
            "preempt": reclaimable.preempt,
        }
        exhausted = rest[command.method] == 0
        self._report(Reclaimed(seq=command.seq, freed_bytes=freed, exhausted=exhausted))
        for rid in preempted:
            self._admission.requeue_preempted(rid)

    def _lower(self, level: int, wanted_bytes: int) -> None:
        scheduler = self._admission.scheduler
        level = min(level, scheduler.sizes.lowest_level)
        self._admission.set_start_level(max(level, scheduler.start_level))
        for rid in scheduler.victims():
            if wanted_bytes > 0 and scheduler.find(rid).level < level:
                wanted_bytes -= (
                    scheduler.step_down_savings(rid, level) * self._admission.budget.page_bytes
                )
                self._admission.step_down(rid, level)

    def _park(self, wanted_bytes: int) -> list[str]:
        admission = self._admission
        preempted = []
        for rid in admission.scheduler.victims():
            if wanted_bytes <= 0:
                break
            if not can_preempt(self._rows[rid]):
                continue
            nbytes = admission.scheduler.find(rid).pages * admission.budget.page_bytes
            wanted_bytes -= nbytes
            admission.preempt(rid)
            self._report(RowPreempted(rid=rid, nbytes=nbytes, where=self._where))
            preempted.append(rid)
        return preempted

    def restore(self, rid: str) -> None:
        """Let a row go on that was parked."""
        self._rows[rid].resumed_at = self._rows[rid].longest
        self._report(RowResumed(rid=rid))
