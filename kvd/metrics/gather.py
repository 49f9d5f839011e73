"""Turns counters and a snapshot of the system into samples."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from actors.machines.gauge import Pressure
from actors.request_state import Stage
from kvd.metrics import catalogue as c
from kvd.metrics.samples import Buckets, Samples
from protocol import types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.metrics.counters import Counters, ModelCounters
    from kvd.metrics.histogram import Histogram
    from kvd.metrics.process import Process

_PYTHON = ".".join(map(str, sys.version_info[:3]))
STAGES, STATES, PRESSURES = get_args(Stage), get_args(types.ModelState), get_args(Pressure)


@dataclass(frozen=True)
class Snapshot:
    """The state of the daemon at a scrape."""

    status: types.DaemonStatus
    requests: Mapping[tuple[str, Stage], int]
    counters: Counters
    lag: Histogram
    answers: Mapping[tuple[str, int], int]
    """HTTP responses by path and status."""
    ignored: Mapping[tuple[str, str], int]
    """What HTTP requests had and kvd ignored, by path and kind."""
    process: Process
    started_at: float
    """Start of the daemon in seconds since 1970."""


def samples_of(it: Snapshot) -> Samples:
    found = Samples()
    _daemon(found, it)
    _host(found, it.status.host)
    for model in it.status.models:
        _model(found, model)
        if (counted := it.counters.models.get(model.name)) is not None:
            found.put(c.ALLOCATOR_PEAK, counted.worker.peak, model.name)
    _requests(found, it)
    for name, counted in it.counters.models.items():
        _counted(found, name, counted)
    return found


def _daemon(to: Samples, it: Snapshot) -> None:
    status, process = it.status, it.process
    to.put(c.BUDGET, status.budget_bytes)
    to.put(c.GRANTED, status.granted_bytes)
    for number, device in enumerate(status.devices):
        to.put(c.DEVICE_BUDGET, device.budget_bytes, str(number))
        to.put(c.DEVICE_GRANTED, device.granted_bytes, str(number))
    if (of_host := status.host_budget) is not None:
        to.put(c.HOST_BUDGET, of_host.budget_bytes)
        to.put(c.HOST_GRANTED, of_host.granted_bytes)
    to.put(c.VIOLATIONS, status.violations)
    to.put(c.UNLOADED, len(status.unloaded))
    to.put(c.BUILD, 1, status.version, _PYTHON)
    to.put(c.DRAINING, int(status.state == "draining"))
    to.put(c.LAG, _buckets(it.lag))
    for (path, code), count in it.answers.items():
        to.put(c.HTTP, count, path, str(code))
    for (path, what), count in it.ignored.items():
        to.put(c.HTTP_IGNORED, count, path, what)
    to.put(c.FOOTPRINT, status.footprint_bytes)
    to.put(c.CPU, process.cpu_s)
    to.put(c.FILES, process.open_files)
    if process.most_files is not None:
        to.put(c.MOST_FILES, process.most_files)
    to.put(c.STARTED, it.started_at)
    if (store := status.prefix_store) is not None:
        to.put(c.STORE_ON, int(store.state == "on"))
        to.put(c.STORE_BYTES, store.stored_bytes)
        to.put(c.STORE_LIMIT, store.limit_bytes)
        to.put(c.STORE_SEGMENTS, store.segments)
        to.put(c.STORE_EVICTED, store.evicted_segments)
        to.put(c.STORE_TODAY, store.written_today_bytes)
        to.put(c.STORE_DAILY, store.daily_bytes)


def _host(to: Samples, host: types.HostMemory) -> None:
    to.put(c.HOST_MEMORY, host.total)
    to.put(c.HOST_AVAILABLE, host.available)
    if host.accelerator_limit is not None:
        to.put(c.ACCELERATOR_LIMIT, host.accelerator_limit)
    to.put_state(c.HOST_PRESSURE, host.pressure, PRESSURES)


def _model(to: Samples, model: types.ModelStatus) -> None:
    name, stats = model.name, model.stats
    to.put_state(c.STATE, model.state, STATES, name)
    to.put(c.MODEL_GRANTED, model.granted_bytes, name)
    to.put(c.MODEL_FOOTPRINT, stats.memory.footprint, name)
    for rank, one in enumerate(model.ranks):
        to.put(c.RANK_FOOTPRINT, one.footprint_bytes, name, str(rank))
    to.put_all(c.MODEL_MEMORY, _kinds(stats.memory), name)
    to.put(c.ALLOCATOR_ACTIVE, stats.memory.active, name)
    to.put_all(c.KV_LEVEL, _levels(stats.memory, model.info), name)
    free = max(0, stats.pages_total - stats.pages_used)
    to.put_all(c.KV_PAGES, {"used": stats.pages_used, "free": free}, name)
    to.put(c.START_LEVEL, stats.reclaimable.level, name)
    to.put_all(c.RECLAIMABLE, _methods(stats.reclaimable), name)
    to.put(c.PREFIX_CHECKPOINTS, stats.prefix.checkpoints, name)
    to.put(c.PREFIX_BYTES, stats.prefix.held, name)
    if (info := model.info) is not None:
        to.put(c.INFO, 1, name, info.architecture, info.dtype, info.kv_scheme, info.device)
        to.put(c.ATTENTION, 1, name, info.attention_path)
        if info.fused is not None:
            to.put_all(c.ATTENTION_CALL, _calls(info.fused), name)


def _kinds(memory: types.MemoryUse) -> dict[str, int]:
    return {
        "weights": memory.weights,
        "kv_pages_used": memory.kv_pages_used,
        "kv_pages_free": max(0, memory.kv_pages - memory.kv_pages_used),
        "kv_tails": memory.kv_tails,
        "scratch": memory.scratch,
        "allocator_cache": memory.cache,
    }


def _levels(memory: types.MemoryUse, info: types.ModelInfo | None) -> dict[str, int]:
    """Return the bytes on each precision level, by its KV scheme."""
    if info is None:
        return {}
    names = info.kv_schemes or [info.kv_scheme]
    held = memory.kv_levels or (memory.kv_pages_used,)
    return {name: held[at] if at < len(held) else 0 for at, name in enumerate(names)}


def _methods(reclaimable: types.Reclaimable) -> dict[str, int]:
    return {
        "spare": reclaimable.spare,
        "prefixes": reclaimable.prefixes,
        "precision": sum(reclaimable.levels),
        "preempt": reclaimable.preempt,
    }


def _calls(fused: types.FusedAttention) -> dict[str, float]:
    """Return the seconds of a layer's attention by path, as measured at load."""
    timed = {"fused": fused.call_ms, "reference": fused.reference_ms}
    return {path: ms / 1e3 for path, ms in timed.items() if ms is not None}


def _requests(to: Samples, it: Snapshot) -> None:
    for model in it.status.models:
        to.put_all(c.REQUESTS, dict.fromkeys(STAGES, 0), model.name)
    sums: dict[tuple[str, str], int] = {}
    for (model_name, stage), count in it.requests.items():
        key = it.counters.name(model_name), stage
        sums[key] = sums.get(key, 0) + count
    for (name, stage_name), count in sums.items():
        to.put(c.REQUESTS, count, name, stage_name)


def _counted(to: Samples, name: str, it: ModelCounters) -> None:
    to.put(c.RECEIVED, it.received, name)
    to.put_all(c.FAILED, it.failed, name)
    to.put_all(c.ACTIONS, it.actions, name)
    if not name:  # requests without a known model were refused
        return
    to.put_all(c.FINISHED, it.finished, name)
    to.put_all(c.PAUSED, it.paused, name)
    to.put(c.RESUMED, it.resumed, name)
    to.put(c.PROMPT_TOKENS, it.prompt_tokens, name)
    to.put_all(c.CACHE_TOKENS, it.cache_tokens, name)
    to.put(c.GENERATED, it.generated, name)
    to.put(c.LOADS, it.loads, name)
    to.put_all(c.RESTARTS, it.restarts, name)
    to.put(c.QUEUE_TIME, _buckets(it.queue), name)
    to.put(c.FIRST_TOKEN, _buckets(it.first), name)
    to.put(c.TOKEN_GAP, _buckets(it.gaps), name)
    to.put(c.WHOLE_TIME, _buckets(it.whole), name)
    to.put(c.STORE_HITS, it.segment_hits, name)
    to.put(c.STORE_HIT_TOKENS, it.segment_tokens, name)
    to.put(c.STORE_SAVED, it.segment_saved_s, name)
    to.put(c.STORE_WRITTEN, it.segment_bytes, name)
    to.put(c.STORE_READ, it.segment_read_bytes, name)
    to.put_all(c.STORE_REFUSED, it.segments_refused, name)
    _of_workers(to, name, it)


def _of_workers(to: Samples, name: str, it: ModelCounters) -> None:
    total = it.worker.total
    to.put(c.STEPS, total.step, name)
    to.put(c.FLUSHES, total.flushes, name)
    to.put(c.LAUNCHES, total.kernel_launches, name)
    to.put(c.COMPUTED_TOKENS, total.computed_tokens, name)
    to.put(c.PREFIX_LOOKUPS, total.prefix.queries, name)
    to.put(c.PREFIX_QUERIES, total.prefix.query_tokens, name)
    to.put(c.PREFIX_HITS, total.prefix.hit_tokens, name)
    to.put(c.PREFIX_EVICTED, total.prefix.evicted, name)
    for phase, spread in total.phases.items():
        to.put(c.PHASES, Buckets(spread.counts, spread.total_s), name, phase)


def _buckets(it: Histogram) -> Buckets:
    return Buckets(tuple(it.counts), it.total)
