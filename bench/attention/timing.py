"""Times of single calls, amortized over many in one evaluation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from bench.attention.case import CALLS

REPEATS = 7
MOST_SECONDS = 0.4
"""Seconds that all repeats of one measurement may take; slow paths get fewer calls."""
FEW_CALLS = 2
EVALUATIONS = 4
"""Evaluations that follow each other without a wait."""
_COPIED = 1 << 30

Call = Callable[[int, mx.array], mx.array]
"""Attends queries ``[rows, q_heads, 1, dim]`` to the layer that the call's number selects; lazy."""


@dataclass(frozen=True)
class Timed:
    """Times of one path on one shape."""

    ms: float
    """Milliseconds of a call if calls do not depend on each other: median of the repeats."""
    serial_ms: float
    """Milliseconds of a call if its queries are the previous call's result, as in a model."""
    first_s: float
    """Seconds of the very first call, including compilation."""
    calls: int
    """Calls in one evaluation."""


def measure(call: Call, queries: mx.array) -> Timed:
    """Time a path; ``queries``: ``[calls, rows, q_heads, 1, dim]``.

    The queries are sliced before the clock starts: a slice takes 10 µs, and a model needs none,
    because its queries are an array of their own.
    """
    asked = [queries[number] for number in range(queries.shape[0])]
    mx.eval(asked)
    first = _seconds(lambda: [call(0, asked[0])])
    single = _seconds(lambda: [call(1, asked[1])])
    calls = max(FEW_CALLS, min(CALLS, int(MOST_SECONDS / (2 * REPEATS * EVALUATIONS * single))))
    repeats = REPEATS if calls > FEW_CALLS else 3

    def beside() -> list[mx.array]:
        return [call(number, asked[number]) for number in range(calls)]

    def serial() -> list[mx.array]:
        found = [asked[0]]
        for number in range(calls):
            found.append(call(number, found[-1]))
        return found[1:]

    ms, serial_ms = (_median_ms(work, calls, repeats) for work in (beside, serial))
    return Timed(ms, serial_ms, first, calls)


def _median_ms(work: Callable[[], list[mx.array]], calls: int, repeats: int) -> float:
    """Return the median milliseconds of a call in back-to-back evaluations, like an engine's steps.

    Graphs are built before the clock starts, because an engine's steps are compiled.
    """
    found = []
    for _ in range(repeats + 1):
        graphs = [work() for _ in range(EVALUATIONS)]
        mx.synchronize()
        start = time.perf_counter()
        for graph in graphs:
            mx.async_eval(graph)
        mx.synchronize()
        found.append(time.perf_counter() - start)
    return 1e3 * statistics.median(found[1:]) / (EVALUATIONS * calls)


def _seconds(work: Callable[[], list[mx.array]]) -> float:
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(work())
    mx.synchronize()
    return time.perf_counter() - start


def copy_bandwidth(nbytes: int = _COPIED, calls: int = 8) -> float:
    """Return the bytes per second, read plus written, of an operation that only moves data.

    The operation is an elementwise negation, because MLX often optimizes a plain copy away.
    """
    source = mx.random.normal((nbytes // 4,))
    mx.eval(source)
    ms = _median_ms(lambda: [mx.negative(source) for _ in range(calls)], calls, REPEATS)
    return 2 * source.nbytes / (ms / 1e3)
