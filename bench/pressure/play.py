"""One run: starts a daemon, loads the models, sends all streams at once, returns the outcomes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.own import daemon
from bench.pressure.streams import Stream
from bench.pressure.watch import Watch
from kvd.client import AsyncClient
from kvd.config.kv import parse_kv
from kvd.host import memory
from protocol.errors import KvdError
from protocol.messages import EventRecord, Tokens
from protocol.policy import PolicyChange

AMPLE = 1 << 42
"""A budget that is never reached."""
CONFIG = f'budget = {AMPLE}\nbits_by_layer = "off"\n'
"""Configuration under which tokens of one precision level are equal in all loads.

Otherwise a load gives the layers of lower levels other bits once an earlier load's probe has ended.
"""
URGENT = "wide"
"""Alias of the model with priority: rows of other models are preempted for it."""
_WORKED_OFF_S = 0.05
"""Seconds between polls until the grants fit into a smaller budget."""
_AFTER_S = 0.5
"""Seconds to wait for the workers' last counters."""


@dataclass
class Outcome:
    """Result of one stream."""

    model: str
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    error: str = ""
    levels: list[int] = field(default_factory=list)
    """Precision levels that the stream ran on, in order."""
    events: dict[str, int] = field(default_factory=dict)
    """Number of events of each kind, except tokens."""
    first_s: float | None = None
    end_s: float | None = None


@dataclass
class Run:
    """Results of all streams, and what was recorded meanwhile."""

    outcomes: list[Outcome]
    watched: dict[str, Any]
    bases: dict[str, int]
    """Bytes that each worker is charged for besides its rows, by model."""
    budget: int
    peak_granted: int
    governed: str
    """Which memory is governed: ``accelerator`` if it has separate memory, else ``footprint``."""
    peak_footprint: int
    """Peak of the workers' governed memory; on accelerators it includes peaks between counters."""
    actions: list[dict[str, Any]]
    """The governor's actions, from its events."""
    violations: int
    """How often the grants exceeded the budget, as counted by the daemon."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the run as plain values, with counts of tokens instead of the tokens."""
        outcomes = [{**asdict(one), "tokens": len(one.tokens)} for one in self.outcomes]
        return {**asdict(self), "outcomes": outcomes}


async def play(
    models: dict[str, str],
    streams: list[Stream],
    *,
    kv: str,
    budget: Callable[[int], int] | None = None,
) -> Run:
    """Load the models (alias to source), send all streams at once, and wait for their ends.

    ``budget``: function from the sum of the measured bases to the budget. The budget is set when
    all models are loaded, because a base depends on which processes share the same libraries.
    None: enough memory for everything.
    """
    async with daemon(CONFIG) as client:
        loads = [
            await client.load(
                source,
                alias=alias,
                kv=parse_kv(kv),
                policy=PolicyChange(priority=1 if alias == URGENT else 0),
            )
            for alias, source in models.items()
        ]
        for loading in loads:
            await loading.result()
        status = await client.status()
        bases = {one.name: one.stats.reclaimable.base for one in status.models}
        total = budget(sum(bases.values())) if budget is not None else AMPLE
        while (await client.configure(budget_bytes=total)).granted_bytes > total:  # noqa: ASYNC110
            await asyncio.sleep(_WORKED_OFF_S)
        began = [event async for event in client.events()]
        start = time.time()
        outcomes, watch = await serve(client, streams)
        after = [event async for event in client.events(since=began[-1].seq if began else 0)]
        separate = memory.reader().separate
        return Run(
            outcomes=outcomes,
            watched=watch.as_dict(),
            bases=bases,
            budget=total,
            peak_granted=max(one.granted for one in watch.kinds),
            governed="accelerator" if separate else "footprint",
            peak_footprint=max(
                one.device_peak if separate else one.footprint for one in watch.samples
            ),
            actions=[_action(event, start) for event in after],
            violations=(await client.status()).violations,
            seconds=max(one.end_s or 0.0 for one in outcomes),
        )


async def serve(client: AsyncClient, streams: list[Stream]) -> tuple[list[Outcome], Watch]:
    """Send all streams at once; return their outcomes and the samples taken meanwhile."""
    async with Watch(client) as watch:
        outcomes = await asyncio.gather(*(_one(client, watch, one) for one in streams))
        await asyncio.sleep(_AFTER_S)
    return list(outcomes), watch


def _action(event: EventRecord, start: float) -> dict[str, Any]:
    return {
        "at": round(event.at - start, 3),
        "kind": event.kind,
        "model": event.model,
        "requester": event.requester,
        "reason": event.reason,
        "numbers": event.numbers,
    }


async def _one(client: AsyncClient, watch: Watch, stream: Stream) -> Outcome:
    outcome = Outcome(stream.model)
    events: Counter[str] = Counter()
    try:
        completion = await client.generate(
            stream.model,
            tokens=stream.tokens,
            max_tokens=stream.max_tokens,
            temperature=stream.temperature,
            seed=stream.seed,
            ignore_eos=True,
        )
        async for event in completion:
            if isinstance(event, Tokens):
                outcome.tokens += event.tokens
                outcome.first_s = outcome.first_s or round(watch.now, 3)
            else:
                events[type(event).__name__.lower()] += 1
        outcome.reason = completion.reason or ""
        outcome.levels = completion.usage.levels if completion.usage is not None else []
    except KvdError as error:
        outcome.error = f"{error.code}: {error.message}"
    outcome.end_s = round(watch.now, 3)
    outcome.events = dict(events)
    return outcome
