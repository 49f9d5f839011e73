"""Measures servers in bounded time: each trace on each server gets an equal share of it.

A run that needs more time than its share is stopped, and counts with what has arrived by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.bench.measure import Measures, Stream, summarize, summarize_stopped
from kvd.bench.player import play
from kvd.bench.prompts import Prompts
from kvd.bench.servers import Server
from kvd.bench.traces import Ask, Trace, build

WARM_UP = Trace("warm-up", (Ask(64, 8),) * 2)
"""Unmeasured requests, because a server's first requests find cold code and empty pools."""
_WARM_UP_SHARE = 0.1
"""Part of the time that warming up may take."""
_SAME = 0.02
"""Relative difference of token counts up to which two servers have the same tokenizer."""


@dataclass
class Outcome:
    """Results of the measured traces."""

    results: dict[str, dict[str, list[Measures]]] = field(default_factory=dict)
    """Measures of each run, by trace and by side."""
    stopped: set[tuple[str, str]] = field(default_factory=set)
    """Traces and sides with a run that was stopped."""
    notes: list[str] = field(default_factory=list)
    """What limits the comparison, as sentences."""


class Session:
    """Plays traces on the servers; the first one is the reference for notes."""

    def __init__(
        self,
        servers: Mapping[str, Server],
        prompts: Prompts,
        traces: Sequence[str],
        *,
        runs: int,
        limit_s: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.outcome = Outcome()
        self._servers = dict(servers)
        self._reference = next(iter(servers))
        self._prompts = prompts
        self._plays = [(name, number) for name in traces for number in range(runs)]
        self._limit_s = limit_s
        self._say = say
        self._prompt_tokens: dict[tuple[str, int], dict[str, int]] = {}

    async def run(self) -> Outcome:
        """Warm up, then play all runs of all traces; the order of the servers rotates."""
        deadline = time.monotonic() + self._limit_s
        for side in list(self._servers):
            self._say(f"{side}: warming up")
            share = _WARM_UP_SHARE * self._limit_s / len(self._servers)
            await self._play(side, WARM_UP, 0, share)
        for done, (name, number) in enumerate(self._plays):
            sides = list(self._servers)
            first = number % len(sides) if sides else 0
            order = sides[first:] + sides[:first]
            for at, side in enumerate(order):
                left = len(sides) * (len(self._plays) - done) - at
                share = max(0.0, deadline - time.monotonic()) / left
                self._say(f"{side}: {name}, {left} more")
                await self._measure(side, name, number, share)
        self._compare()
        return self.outcome

    async def _measure(self, side: str, name: str, number: int, limit_s: float) -> None:
        trace = build(name, 1, number)
        started = time.monotonic()
        streams = await self._play(side, trace, number, limit_s)
        if streams is None:
            return
        if all(stream.finished and stream.arrivals for stream in streams):
            measures = summarize(trace, streams)
            counts = self._prompt_tokens.setdefault((name, number), {})
            counts[side] = sum(stream.prompt_tokens for stream in streams)
            if measures.tokens < trace.output_tokens:
                self._note(f"{side} ended requests early, so it generated fewer tokens")
        else:
            measures = summarize_stopped(trace, streams, time.monotonic() - started)
            self.outcome.stopped.add((name, side))
        runs = self.outcome.results.setdefault(name, {}).setdefault(side, [])
        runs.append(measures)

    async def _play(
        self, side: str, trace: Trace, number: int, limit_s: float
    ) -> list[Stream] | None:
        """Return the streams, or None if the server failed; it is left out from then on."""
        prompts = self._prompts.of(trace, 1, number)
        try:
            return await play(trace, prompts, self._servers[side].driver, limit_s=limit_s)
        except ExceptionGroup as group:
            error = group.exceptions[0]
            self._note(f"{side} failed in {trace.name} and is left out: {error}")
            del self._servers[side]
            return None

    def _compare(self) -> None:
        """Note servers whose prompts had another number of tokens."""
        for counts in self._prompt_tokens.values():
            reference = counts.get(self._reference, 0)
            for side, count in counts.items():
                if reference and count and abs(count - reference) > _SAME * reference:
                    self._note(f"{side} has another tokenizer, so its prompts differ in tokens")

    def _note(self, text: str) -> None:
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)
