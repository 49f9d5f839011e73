"""Checks of memory: pools are written in place, MLX keeps its limit, and readings are right."""

from __future__ import annotations

import os
import time

import mlx.core as mx

from kvd.host import memory as readings
from kvd.worker.cache.batch import make_caches
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore
from kvd.worker.process import memory
from kvd.worker.selftest.outcome import Outcome, outcome_of

_MIB = 1 << 20
_GEOMETRY = LayerGeometry(kv_heads=4, k_dim=128, v_dim=128)
_LAYERS = 4


def flush(*, quick: bool) -> Outcome:
    """Write full pages into pools, and check that no pool is copied."""
    tokens = 2560 if quick else 13312
    store = KVStore([_GEOMETRY] * _LAYERS, Scheme(8, 8), mx.float32)
    caches = make_caches(store)
    row = store.new_row()

    def give(count: int) -> None:
        noise = mx.random.normal((1, _GEOMETRY.kv_heads, count, _GEOMETRY.k_dim))
        for cache in caches:
            cache.update_and_fetch(noise, noise)

    for _ in range(0, tokens, 512):
        store.begin_prefill(row, 512)
        give(512)
        store.finish_prefill()
    worst, took, flushes = 0, 0.0, 0
    for _ in range(10 * PAGE_TOKENS):
        mx.eval(store.arrays())
        if store.needs_flush([row]):
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            start = time.perf_counter()
            store.flush()
            mx.eval(store.arrays())
            took = max(took, time.perf_counter() - start)
            # Skipped if a pool grew: that copies the pool, for which memory is reserved.
            if mx.get_active_memory() <= before + _MIB:
                worst = max(worst, mx.get_peak_memory() - before)
                flushes += 1
        store.begin_decode([row])
        give(1)
    pools = store.pages.nbytes
    text = (
        f"{flushes} flushes into {pools / _MIB:.0f} MiB of pools used {worst / _MIB:.1f} MiB of "
        f"temporary memory and {took * 1e3:.1f} ms at most"
    )
    return outcome_of(
        "flush in place",
        text,
        right=flushes > 0 and worst < pools / 4,
        pool_bytes=pools,
        moment_bytes=worst,
        flushes=flushes,
        flush_ms=round(took * 1e3, 2),
    )


def limits() -> Outcome:
    """Check that MLX keeps no more freed buffers than its limit."""
    limit = 64 * _MIB
    before = mx.set_cache_limit(limit)
    try:
        mx.clear_cache()
        for _ in range(4):
            arrays = [mx.ones((8 * _MIB,)) + 1 for _ in range(4)]  # 32 MiB each
            mx.eval(arrays)
            del arrays
        kept = mx.get_cache_memory()
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()
    text = f"MLX kept {kept / _MIB:.0f} of 128 MiB freed (limit {limit / _MIB:.0f} MiB)"
    right, name = kept <= limit, "limit of freed buffers"
    return outcome_of(name, text, right=right, kept_bytes=kept, limit_bytes=limit)


def footprint() -> Outcome:
    """Check that the worker's and the daemon's reading of the footprint show an array's memory.

    It must also be freed again. Skipped if the device has separate memory.
    """
    name = "footprint"
    reader = readings.reader()
    if reader.separate:
        return Outcome(name, "skip", "the device has separate memory, which is counted instead")
    size = 256 * _MIB
    mx.clear_cache()
    memory.trim_malloc()
    before, outside = memory.footprint_now(), reader.footprint(os.getpid())
    array = mx.ones((size // 4,)) + 1
    mx.eval(array)
    with_array, outside_with_array = memory.footprint_now(), reader.footprint(os.getpid())
    del array
    mx.clear_cache()
    memory.trim_malloc()
    after = memory.footprint_now()
    grew, outside_grew = with_array - before, outside_with_array - outside
    text = (
        f"{size / _MIB:.0f} MiB of arrays: the worker reads {grew / _MIB:+.0f} MiB, the daemon "
        f"{outside_grew / _MIB:+.0f} MiB; {(after - before) / _MIB:+.0f} MiB after freeing them"
    )
    shows = all(0.9 * size < growth < 1.25 * size for growth in (grew, outside_grew))
    return outcome_of(
        name,
        text,
        right=shows and after - before < 0.2 * size,
        array_bytes=size,
        before_bytes=before,
        with_array_bytes=with_array,
        after_bytes=after,
        outside_before_bytes=outside,
        outside_with_array_bytes=outside_with_array,
    )


def pressure() -> Outcome:
    """Check that the system's readings of its memory are plausible."""
    host = readings.reader().host()
    numbers: dict[str, float | str] = {
        "total_bytes": host.total,
        "available_bytes": host.available,
        "accelerator_limit_bytes": host.accelerator_limit or 0,
        "pressure": host.pressure,
    }
    text = (
        f"pressure {host.pressure}; {host.available / 2**30:.1f} of {host.total / 2**30:.1f} GiB "
        "are free"
    )
    most = mx.device_info().get("max_recommended_working_set_size")
    right = 0 < host.available <= host.total
    if most and host.accelerator_limit:
        numbers["device_recommends_bytes"] = int(most)
        text += f"; Metal recommends {int(most) / 2**30:.2f} GiB, kvd computed "
        text += f"{host.accelerator_limit / 2**30:.2f}"
        right = right and abs(int(most) - host.accelerator_limit) < 0.02 * int(most)
    return outcome_of("pressure and limits", text, right=right, **numbers)
