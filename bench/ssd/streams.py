"""The delay of streams while another request's prefix is read from disk."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from bench.ssd import prompts
from bench.ssd.worker import Answer, Worker
from kvd.bench.measure import percentile

STREAMS = 7
UNDISTURBED_STEPS = 150
"""Steps before each read that are compared with those during it."""
_SETTLE_STEPS = 40
_MOST_TOKENS = 20_000
"""Limit of a stream, which is cancelled before."""


def measure(worker: Worker, prompt: list[int], *, rounds: int) -> dict[str, Any]:
    """Read a stored prompt ``rounds`` times while seven streams decode; return their gaps.

    ``prompt``: its prefix is on disk, except its last tokens. A gap is the time between two tokens
    of a stream. *Reading* counts those until the prefix is read, *during* also those until the
    prompt's first token. The latter include the prefill of its last tokens, which a prefix in
    memory needs as well. The ratios are those of the 99th percentiles to the undisturbed one. Those
    of *CPU* compare the process's CPU time between tokens, which other processes hardly change.
    """
    room = worker.info.context_length - 64
    streams = [
        worker.send(prompts.tokens(40, seed=number), max_tokens=min(room, _MOST_TOKENS))
        for number in range(STREAMS)
    ]
    rows = [answer for _, answer in streams]
    before: list[float] = []
    during: list[float] = []
    reading: list[float] = []
    cpu_before: list[float] = []
    cpu_reading: list[float] = []
    seconds: list[float] = []
    for _ in range(rounds):
        worker.forget()
        _steps(worker, rows, _SETTLE_STEPS)
        start = rows[0].arrivals[-1]
        _steps(worker, rows, UNDISTURBED_STEPS)
        before += _gaps(rows, start, rows[0].arrivals[-1])
        cpu_before += _cpu_gaps(rows, start, rows[0].arrivals[-1])
        _, restored = worker.send(prompt, max_tokens=1)
        worker.run_until(lambda it=restored: it.over)  # type: ignore[misc]
        if restored.read_at is None:
            continue  # prefill was estimated to be faster
        seconds.append(restored.read_at - restored.sent)
        during += _gaps(rows, restored.sent, restored.arrivals[0])
        reading += _gaps(rows, restored.sent, restored.read_at)
        cpu_reading += _cpu_gaps(rows, restored.sent, restored.read_at)
    for rid, _ in streams:
        worker.engine.cancel(rid)
    worker.run_until(lambda: all(answer.over for answer in rows))
    undisturbed, disturbed = percentile(before, 99), percentile(reading, 99)
    return {
        "reads": len(seconds),
        "read_s": percentile(seconds, 50),
        "undisturbed_p50_s": percentile(before, 50),
        "undisturbed_p99_s": undisturbed,
        "gaps": len(reading),
        "reading_p50_s": percentile(reading, 50),
        "reading_p99_s": disturbed,
        "during_p99_s": percentile(during, 99),
        "during_max_s": max(during, default=0.0),
        "ratio": disturbed / undisturbed,
        "cpu_undisturbed_p99_s": percentile(cpu_before, 99),
        "cpu_reading_p99_s": percentile(cpu_reading, 99),
        "cpu_ratio": percentile(cpu_reading, 99) / percentile(cpu_before, 99),
        "during_ratio": percentile(during, 99) / undisturbed,
    }


def _steps(worker: Worker, rows: list[Answer], count: int) -> None:
    """Step until every row has ``count`` more tokens."""
    wanted = [len(row.tokens) + count for row in rows]
    worker.run_until(
        lambda: all(len(row.tokens) >= least for row, least in zip(rows, wanted, strict=True))
    )


def _gaps(rows: list[Answer], since: float, until: float) -> list[float]:
    """Return the times between tokens of each row that overlap an interval.

    A gap that begins at its end is not included: the prefill of a prompt's rest follows its read.
    """
    return [
        when - before
        for row in rows
        for before, when in pairwise(row.arrivals)
        if when > since and before < until
    ]


def _cpu_gaps(rows: list[Answer], since: float, until: float) -> list[float]:
    """Return the CPU times of the same gaps as `_gaps`."""
    return [
        cpu - cpu_before
        for row in rows
        for (before, when), (cpu_before, cpu) in zip(
            pairwise(row.arrivals), pairwise(row.cpu_arrivals), strict=True
        )
        if when > since and before < until
    ]
