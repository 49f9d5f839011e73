"""Decides whether kernels run decode attention: if they are right and faster on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.shape import LANES
from kvd.worker.attention.kernels.text import RUN
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.scheme import LayerGeometry
from kvd.worker.cache.store import KVStore
from kvd.worker.process.shortage import shortage_of
from kvd.worker.serving import kernel_timing
from kvd.worker.serving.selfcheck import SelfCheckFailed
from kvd.worker.serving.timed_kernels import TimedKernels, first_line
from protocol.types import FastPathCause, FusedAttention

Check = Callable[[Backend], float]
"""Serves the model with a backend in every way that may occur; returns the error, or raises
`SelfCheckFailed`."""


def check_kernels(
    backend: FusedBackend,
    stores: Sequence[KVStore],
    check: Check,
    check_plain: Callable[[], object] | None,
) -> tuple[FusedAttention, float]:
    """Return the verdict on kernels, and their error.

    ``stores``: the stores that they would serve. The kernels must run at all, be right, and be
    faster, in this order. ``check_plain``: checks the plain operations if they have to be timed;
    raises `SelfCheckFailed` if none are right. Without it, correct kernels are used whatever their
    time.
    """
    timed = TimedKernels(backend.kernels)
    for geometry in (layer.geometry for store in stores for layer in store.layers):
        if not has_kernels_for(geometry):
            sizes = f"keys of size {geometry.k_dim} and values of size {geometry.v_dim}"
            return _unused("model", f"there are no kernels for {sizes}", timed), 0.0
    try:
        error = check(replace(backend, kernels=timed))
    except SelfCheckFailed as refused:
        cause: FastPathCause = "results" if refused.__cause__ is None else "error"
        return _unused(cause, str(refused), timed), 0.0
    try:
        times = kernel_timing.compare(stores, backend, timed.compiled, check_plain)
    except SelfCheckFailed:
        raise
    except Exception as failed:  # drivers raise any type
        if shortage_of(failed) is not None:
            raise
        why = f"the kernels fail on longer rows: {first_line(failed)}"
        return _unused("error", why, timed), error
    if times is None:
        return _unused("error", "no kernel was launched", timed), error
    plain_s = times.reference_s
    faster = plain_s is None or times.fused_s < plain_s
    found = FusedAttention(
        used=faster,
        reason=None if faster else "slower than plain operations",
        cause="" if faster else "speed",
        compile_s=timed.compile_s,
        call_ms=times.fused_s * 1e3,
        reference_ms=None if plain_s is None else plain_s * 1e3,
        rows=kernel_timing.ROWS,
        keys=times.keys,
    )
    return found, error


def has_kernels_for(geometry: LayerGeometry) -> bool:
    """Return whether there are kernels for these head sizes.

    They must be multiples of `RUN`, and values at most one run per lane.
    """
    sizes = geometry.k_dim, geometry.v_dim
    return not any(size % RUN for size in sizes) and 0 < geometry.v_dim <= RUN * LANES


def _unused(cause: FastPathCause, reason: str, timed: TimedKernels) -> FusedAttention:
    return FusedAttention(used=False, reason=reason, cause=cause, compile_s=timed.compile_s)


def describe_verdict(verdict: FusedAttention) -> str:
    parts = [f"fused attention {'is used' if verdict.used else f'is not used: {verdict.reason}'}"]
    if verdict.call_ms is not None:
        plain = verdict.reference_ms
        compared = "" if plain is None else f", plain operations {plain:.3f} ms"
        step = f"({verdict.rows} rows of {verdict.keys} keys)"
        parts.append(f"{verdict.call_ms:.3f} ms per layer{compared} {step}")
    if verdict.layers:
        parts.append(f"{verdict.layers} whole layers run as kernels")
    if verdict.compile_s:
        parts.append(f"compiled in {verdict.compile_s:.1f} s")
    return "; ".join(parts)
