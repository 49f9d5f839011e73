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
"""Seconds that the repeats of one number may take; slow paths are called less often."""
FEW_CALLS = 2
EVALUATIONS = 4
"""Evaluations that follow each other without a wait."""
_COPIED = 1 << 30

Call = Callable[[int, mx.array], mx.array]
"""Attends queries ``[rows, q_heads, 1, dim]`` to what the call of this number reads; lazy."""


@dataclass(frozen=True)
class Timed:
    """One path on one shape."""

    ms: float
    """A call beside others that do not wait for it: median of the repeats."""
    serial_ms: float
    """A call that attends with the result of the one before, as layers follow each other."""
    first_s: float
    """The first call of all, with what is compiled for it."""
    calls: int
    """Calls in one evaluation."""


def measure(call: Call, queries: mx.array) -> Timed:
    """Time a path; ``queries``: ``[calls, rows, q_heads, 1, dim]``.

    Each call's part of them is taken before the clock starts: that takes 10 µs a call, and a
    model's queries come as an array of their own.
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
    """Return what a call takes where evaluations follow each other, as an engine's steps do.

    Graphs are built before the clock starts: an engine's steps are compiled.
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
    """Return the bytes a second, read and written, of an operation that only copies.

    It is one over elements, their negation: what MLX calls a copy it often leaves out.
    """
    source = mx.random.normal((nbytes // 4,))
    mx.eval(source)
    ms = _median_ms(lambda: [mx.negative(source) for _ in range(calls)], calls, REPEATS)
    return 2 * source.nbytes / (ms / 1e3)
