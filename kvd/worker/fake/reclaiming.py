"""Reclaiming in the fake engine: the reports and numbers of the real engine, without delay.

At lower precision levels, pages shrink in proportion to the bits of the KV schemes. Preempted rows
lose nothing, because their tokens are a function of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from kvd.worker.cache.scheme import full_pages
from kvd.worker.core.memory_account import MemoryAccount, can_preempt
from kvd.worker.fake.row import FakeRow
from kvd.worker.prefix.cache import PrefixCache
from kvd.worker.scheduling.admission import Admission, Held
from kvd.worker.scheduling.scheduler import ReservationSizes
from protocol.kv import KVSpec
from protocol.worker import PreemptionMode, Reclaim, Reclaimed, Report, RowPreempted, RowResumed


def sizes_of(kv: KVSpec) -> ReservationSizes:
    """Return the pages that rows take, by precision level."""
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
    """Gives memory of the fake engine back. ``where``: reported for preempted rows."""

    def __init__(
        self,
        admission: Admission,
        prefix_cache: PrefixCache,
        rows: Mapping[str, FakeRow],
        where: PreemptionMode,
        report: Callable[[Report], None],
    ) -> None:
        self._admission = admission
        self._prefix_cache = prefix_cache
        self._rows = rows
        self._where = where
        self._report = report
        self.memory = MemoryAccount(_Cache(prefix_cache), admission, prefix_cache, rows)

    def reclaim(self, command: Reclaim) -> None:
        """Give memory back by the command's method, and report it."""
        page_bytes = self._admission.budget.page_bytes
        preempted: list[str] = []
        match command.method:
            case "prefixes":
                self._prefix_cache.evict(command.wanted_bytes, "reclaim")
            case "precision":
                self._step_down(command.level, command.wanted_bytes)
            case "preempt":
                preempted = self._preempt(command.wanted_bytes)
        held = Held(cached=self.memory.cached_pages)
        target = max(0, self._admission.budget.pages - -(-command.wanted_bytes // page_bytes))
        request, freed = self._admission.give_back(target, held)
        reclaimable = self.memory.reclaimable()
        if request is not None:
            self._report(replace(request, reclaimable=reclaimable))
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

    def _step_down(self, level: int, wanted_bytes: int) -> None:
        scheduler, page_bytes = self._admission.scheduler, self._admission.budget.page_bytes
        level = min(level, scheduler.sizes.lowest_level)
        self._admission.set_start_level(max(level, scheduler.start_level))
        for rid in scheduler.victims():
            if wanted_bytes > 0 and scheduler.find(rid).level < level:
                wanted_bytes -= scheduler.step_down_savings(rid, level) * page_bytes
                self._admission.step_down(rid, level)

    def _preempt(self, wanted_bytes: int) -> list[str]:
        preempted = []
        for rid in self._admission.scheduler.victims():
            if wanted_bytes <= 0 or not can_preempt(self._rows[rid]):
                continue
            wanted_bytes -= self._preempt_one(rid)
            preempted.append(rid)
        return preempted

    def _preempt_one(self, rid: str) -> int:
        """Preempt a request; return the bytes that this frees."""
        admission = self._admission
        nbytes = admission.scheduler.find(rid).pages * admission.budget.page_bytes
        admission.preempt(rid)
        self._report(RowPreempted(rid=rid, nbytes=nbytes, where=self._where))
        return nbytes

    def make_room(self, stalled: str, pages: int) -> None:
        """Preempt requests for a stalled one, the least valuable first, itself at last."""
        wanted_bytes = pages * self._admission.budget.page_bytes
        for rid in self._admission.scheduler.victims():
            if wanted_bytes <= 0:
                break
            wanted_bytes -= self._preempt_one(rid)
            self._admission.requeue_preempted(rid)
            if rid == stalled:
                break

    def resume(self, rid: str) -> None:
        self._rows[rid].resumed_at = self._rows[rid].longest
        self._report(RowResumed(rid=rid))
