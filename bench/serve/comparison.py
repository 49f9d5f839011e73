"""Plays rounds on the servers and collects the measurements."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.serve.machine import busy_s, quiet
from bench.serve.rounds import Round
from bench.serve.sides import takes_part
from kvd.bench import processes
from kvd.bench.measure import Measures, Stream, Unfair, check_fair, summarize
from kvd.bench.player import play
from kvd.bench.prompts import Prompts
from kvd.bench.servers import Server
from kvd.bench.traces import Ask, Trace

WARM_UP = Trace("warm-up", (Ask(64, 16),) * 8)
"""Unmeasured requests, because a server's first requests find cold code and empty pools."""
ATTEMPTS = 4
"""Plays of a run on a machine that is not quiet. The play with the least other work counts."""


class Comparison:
    """The servers, and what was measured on them.

    ``quiet_share``: part of a core that other programs may use during a run; without it, runs do
    not wait for a quiet machine and are not repeated.
    """

    def __init__(
        self,
        servers: dict[str, Server],
        prompts: Prompts,
        *,
        seed: int,
        timeout_s: float,
        console: Console,
        quiet_share: float | None = None,
    ) -> None:
        self.results: dict[str, dict[str, list[Measures]]] = {}
        self.details: list[dict[str, Any]] = []
        """One entry for every play, also for those that do not count."""
        self._servers = servers
        self._prompts = prompts
        self._seed = seed
        self._timeout_s = timeout_s
        self._console = console
        self._quiet_share = quiet_share

    async def warm_up(self) -> None:
        """Send eight short requests to every server."""
        for number, server in enumerate(self._servers.values()):
            await self._play(WARM_UP, number, server)

    async def run(self, one: Round) -> None:
        """Play a round; the order of the sides rotates with its number."""
        sides = [side for side in self._servers if takes_part(side, one.trace)]
        first = one.run % len(sides) if sides else 0
        columns = self.results.setdefault(one.title, {side: [] for side in sides})
        for side in sides[first:] + sides[:first]:
            columns[side].append(await self._measure(one, self._servers[side]))

    async def _measure(self, one: Round, server: Server) -> Measures:
        """Play a run, again while other programs disturb it; return the measures that count."""
        share = self._quiet_share
        plays: list[tuple[dict[str, Any], Measures]] = []
        while not plays or (
            share is not None
            and len(plays) < ATTEMPTS
            and plays[-1][0]["strangers_cpu_share"] > share
        ):
            if share is not None:
                await quiet(share / 2)
            play = await self._attempt(one, len(plays), server)
            plays.append(play)
            self._show(one, server.side.name, *play)
        detail, measures = min(plays, key=lambda play: _or_zero(play[0]["strangers_cpu_share"]))
        detail["counted"] = True
        return measures

    def _show(self, one: Round, side: str, detail: dict[str, Any], measures: Measures) -> None:
        others = detail["strangers_cpu_share"]
        self._console.print(
            f"  {one.title} {one.run + 1} {side}: {measures.tok_s:.0f} tok/s,"
            f" first token p50 {measures.ttft_p50 * 1e3:.0f} ms,"
            f" gap p99 {measures.itl_p99 * 1e3:.0f} ms"
            + ("" if math.isnan(others) else f"; other programs took {others:.2f} of a core"),
            highlight=False,
        )

    async def _attempt(
        self, one: Round, attempt: int, server: Server
    ) -> tuple[dict[str, Any], Measures]:
        """Play a run once; return its entry of `details`, and its measures."""
        pids = server.pids()
        others = [pid for each in self._servers.values() for pid in each.pids() if pid not in pids]
        processes.reset_peaks(pids)
        before, idle, busy = processes.read(pids), _cpu(others), busy_s()
        own, started = time.process_time(), time.monotonic()
        marks: list[tuple[int, float]] = []
        trace = one.build(self._seed)
        streams = await self._play(
            trace, one.words(attempt), server, lambda tokens: marks.append((tokens, _cpu(pids)))
        )
        seconds, own = time.monotonic() - started, time.process_time() - own
        after, idle, busy = processes.read(pids), _cpu(others) - idle, busy_s() - busy
        measures = summarize(trace, streams)
        took = {reading.pid: reading.cpu_s for reading in before}
        spent = {reading.pid: reading.cpu_s - took.get(reading.pid, 0.0) for reading in after}
        detail: dict[str, Any] = {
            "trace": one.title,
            "run": one.run,
            "attempt": attempt,
            "counted": False,
            "side": server.side.name,
            "client_cpu_s": own,
            "tokens_without_message": 1 - sum(s.shown for s in streams) / measures.tokens,
            "idle_servers_cpu_share": idle / seconds,
            "strangers_cpu_share": (busy - own - idle - sum(spent.values())) / seconds,
            "processes": [
                {"name": reading.name, "peak_bytes": reading.peak_bytes,
                 "cpu_s": spent[reading.pid],
                 "cpu_ms_per_token": 1e3 * spent[reading.pid] / measures.tokens}
                for reading in after
            ],
        }  # fmt: skip
        self.details.append(detail)
        if not after:
            return detail, measures
        shared = detail["shared_bytes"] = processes.counted_again(pids)
        return detail, replace(
            measures,
            cpu_ms_per_token=1e3 * sum(spent.values()) / measures.tokens,
            decode_cpu_ms_per_token=_between(marks),
            peak_bytes=sum(reading.peak_bytes for reading in after) - shared,
            largest_bytes=max(reading.peak_bytes for reading in after),
        )

    async def _play(
        self,
        trace: Trace,
        words: int,
        server: Server,
        mark: Callable[[int], None] = lambda _: None,
    ) -> list[Stream]:
        prompts = self._prompts.of(trace, self._seed, words)
        try:
            async with asyncio.timeout(self._timeout_s):
                streams = await play(trace, prompts, server.driver, mark)
        except TimeoutError:
            raise RuntimeError(
                f"{server.side.name} did not finish {trace.name} within {self._timeout_s:g} s"
            ) from None
        except ExceptionGroup as group:
            first = group.exceptions[0]
            raise RuntimeError(f"{server.side.name} failed in {trace.name}: {first!r}") from group
        try:
            check_fair(trace, streams)
        except Unfair as unfair:
            raise Unfair(f"{server.side.name}: {unfair}") from None
        return streams


def _or_zero(share: float) -> float:
    return 0.0 if math.isnan(share) else share


def _cpu(pids: list[int]) -> float:
    return sum(one.cpu_s for one in processes.read(pids))


def _between(marks: list[tuple[int, float]]) -> float:
    """Return the CPU milliseconds per token generated between two marks.

    A mark holds the tokens and the CPU seconds up to its time. Without two marks: nan.
    """
    if len(marks) < 2 or marks[0][0] == marks[1][0]:
        return math.nan
    (tokens, cpu), (later_tokens, later_cpu) = marks
    return 1e3 * (later_cpu - cpu) / (later_tokens - tokens)
