"""A simulated week of agents on five models, and what a prefix store saves of their prefill.

Agents of one kind begin with a common prompt. Conversations grow turn by turn, are sometimes forked
and mostly abandoned; a few are continued hours or days later. Workers lose their memory several
times a day, and with faults, they and the daemon are killed while they write, the disk fails for
minutes, and files are damaged. A second store without limits has the same traffic and the same
faults, and shows what could have been saved.

A seed decides everything, the limits included: a quarter to a half of the bytes that the unlimited
store keeps, and 1.1 to 2 times its writes, of which prefixes that were not used again may use only
half. ``python -m tests.sim.prefix_week FIRST [LAST] [--json FILE]`` runs weeks and prints the seeds
that fail.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from actors.machines import prefix_store_events as ev
from actors.machines.segment_writes import DAY_S
from protocol import worker as wire
from protocol.segments import SegmentInfo
from tests.sim.store_sim import UNLIMITED, StoreSim

MODELS = 5
KINDS = 4
"""Kinds of agents per model, each with its own common prompt."""
AGENTS = 2
"""Agents that work with a model at a time."""
CHUNK = 256
LEAST_RATE = 0.9
"""Part of the unlimited store's hits that a limited one must have."""


@dataclass
class Conversation:
    model: int
    prefix: bytes
    """What its tokens are, up to its end."""
    ends: list[tuple[bytes, int]]
    """Key and tokens of the prefix after each turn, and of the common prompt first."""


@dataclass
class Usage:
    """What one store saved."""

    sim: StoreSim
    queried: int = 0
    restored: int = 0

    @property
    def rate(self) -> float:
        return self.restored / max(1, self.queried)


class Week:
    """Feeds the same traffic to several stores, and the same faults if there are any."""

    def __init__(self, seed: int, *limits: ev.StoreLimits, faults: bool = False) -> None:
        self.random = Random(seed)
        self.luck = Random(f"faults {seed}")
        self.faults = faults
        self.fault = ""
        """What happens at the next write."""
        self.works_at = 0.0
        """When the disk works again."""
        self.usages = [Usage(StoreSim(one, MODELS, seed)) for one in limits]
        self.memory: list[dict[bytes, int]] = [{} for _ in range(MODELS)]
        """Prefixes in each worker's memory, and how often prompts continued from them."""
        self.page_bytes = [self.random.randrange(8, 64) * 1024 for _ in range(MODELS)]
        """Bytes of a token."""
        self.waiting: list[tuple[float, int, Conversation]] = []
        self.resting: list[list[Conversation]] = [[] for _ in range(MODELS)]
        """Conversations that may be continued later."""
        self.count = 0
        self.requests = 0

    def run(self, days: float = 7.0) -> None:
        now, forget_at = 0.0, [0.0] * MODELS
        for model in range(MODELS):
            for _ in range(AGENTS):
                self._schedule(self.random.expovariate(1 / 600), self._new(model))
        while True:
            now, _, conversation = heapq.heappop(self.waiting)
            if now > days * DAY_S:
                break
            model = conversation.model
            if now >= forget_at[model]:  # the worker was evicted or restarted
                self._forget(model)
                forget_at[model] = now + self.random.expovariate(1 / (4 * 3600))
            self._pass_time(now)
            self._turn(conversation)
            self._continue(conversation, now)
        self._pass_time(self.works_at + 120)
        for usage in self.usages:
            usage.sim.check()

    def _pass_time(self, now: float) -> None:
        """Let a few seconds pass before the next turn, and choose its fault."""
        draw = self.luck.random() if self.faults else 1.0
        if draw < 0.001:
            self.works_at = now + self.luck.uniform(1, 1200)
        names = ((0.004, "daemon"), (0.012, "worker"), (0.02, "disk"))
        self.fault = next((name for limit, name in names if draw < limit), "")
        for usage in self.usages:
            usage.sim.now, usage.sim.broken = now, now < self.works_at
            usage.sim.handle(ev.AlarmFired())

    def _forget(self, model: int) -> None:
        """Let a worker's memory be lost; without faults it was emptied by other work."""
        self.memory[model].clear()
        if self.faults:
            for usage in self.usages:
                usage.sim.replace_worker(model)

    def _schedule(self, at: float, conversation: Conversation) -> None:
        self.count += 1
        heapq.heappush(self.waiting, (at, self.count, conversation))

    def _new(self, model: int) -> Conversation:
        kind = self.random.randrange(KINDS)
        common = f"{model}/{kind}".encode()
        tokens = CHUNK * (4 + 6 * kind)
        return Conversation(model, common, [(_key(common), tokens)])

    def _turn(self, it: Conversation) -> None:
        """Send a request with a longer prompt than the turn before."""
        self.requests += 1
        it.prefix += self.random.randbytes(4)
        tokens = it.ends[-1][1] + CHUNK * self.random.randrange(1, 12)
        memory, path = self.memory[it.model], it.ends
        it.ends = [*path, (_key(it.prefix), tokens)]
        in_memory = max((tokens for key, tokens in path if key in memory), default=0)
        for usage in self.usages:
            self._query(usage, it, path, tokens, in_memory)
        for key, _ in path:
            memory[key] = memory.get(key, -1) + 1
        memory.setdefault(it.ends[-1][0], 0)
        for usage in self.usages:
            self._offer(usage, it)

    def _query(
        self,
        usage: Usage,
        it: Conversation,
        path: list[tuple[bytes, int]],
        tokens: int,
        in_memory: int,
    ) -> None:
        """Continue from the store if it has more of the prompt than the worker's memory."""
        stored = [one for one in path if usage.sim.knows(one[0])]
        key, found = stored[-1] if stored else (b"", 0)
        if found and self.fault == "disk" and key[0] < 64:
            usage.sim.damage(it.model, key)
            found = 0
        if in_memory < path[-1][1]:  # memory has lost it
            usage.queried += tokens - in_memory
            usage.restored += max(0, found - in_memory)
        if found > in_memory:
            used = wire.SegmentUsed(key=key, tokens=found, seconds=0.1, prefill_s=found / 1000)
            usage.sim.report(it.model, used)

    def _offer(self, usage: Usage, it: Conversation) -> None:
        """Offer all prefixes on the prompt's path that are not stored, shortest first."""
        base, above, last, fault = None, 0, it.ends[-1][1], self.fault
        for key, tokens in it.ends:
            stored = usage.sim.knows(key)
            if not stored:
                nbytes = (tokens - above) * self.page_bytes[it.model]
                segment = SegmentInfo(key=key, base=base, tokens=tokens, nbytes=nbytes)
                hits = self.memory[it.model].get(key, 0)
                stored = usage.sim.offer(it.model, segment, hits, fault if tokens == last else "")
            if stored:
                base, above = key, tokens

    def _continue(self, it: Conversation, now: float) -> None:
        """Schedule what the agent of a conversation does next."""
        draw, busy = self.random.random(), 8 <= now / 3600 % 24 < 20  # agents work by day
        if it.ends[-1][1] > 64 * CHUNK or draw < 0.06:  # the context is full, or it is abandoned
            if self.random.random() < 0.2:
                self.resting[it.model].append(it)
            pause = self.random.expovariate(1 / (600 if busy else 6000))
            self._schedule(now + pause, self._next(it.model))
            return
        if draw < 0.1:  # another attempt from an earlier turn
            ends = it.ends[: self.random.randrange(1, len(it.ends) + 1)]
            self.resting[it.model].append(it)
            it = Conversation(it.model, it.prefix + b"fork", ends)
        pause = self.random.expovariate(1 / 60 if draw < 0.8 else 1 / 3600)
        self._schedule(now + pause, it)

    def _next(self, model: int) -> Conversation:
        """Return a new conversation, or one that rests since an hour or some days."""
        resting = self.resting[model]
        if resting and self.random.random() < 0.2:
            return resting.pop(-1 - min(len(resting) - 1, int(self.random.expovariate(0.3))))
        return self._new(model)


def _key(prefix: bytes) -> bytes:
    return hashlib.blake2b(prefix, digest_size=16).digest()


def compare(
    seed: int, share: float, daily_share: float = 2.0, days: float = 7.0, *, faults: bool = False
) -> Week:
    """Run a week with a limit of ``share`` of the bytes that an unlimited store would keep.

    ``daily_share``: the daily writes, relative to those of the unlimited store.
    """
    unlimited = ev.StoreLimits(UNLIMITED, UNLIMITED, 0)
    oracle = Week(seed, unlimited)
    oracle.run(days)
    total = oracle.usages[0].sim.machine.stored_bytes
    limits = ev.StoreLimits(int(total * share), int(total / days * daily_share), 0)
    week = Week(seed, unlimited, limits, faults=faults)
    week.run(days)
    return week


def run(seed: int) -> dict[str, Any]:
    """Return the counts of a seed's week; raises AssertionError if a promise was broken."""
    random = Random(f"limits {seed}")
    share, daily_share = random.uniform(0.25, 0.5), random.uniform(1.1, 2.0)
    week = compare(seed, share, daily_share, faults=True)
    oracle, limited = week.usages
    ratio = limited.rate / oracle.rate
    assert oracle.rate > 0.5, "the traffic has nothing to store"
    refused = limited.sim.counts["refused: daily_writes"]
    assert limited.sim.machine.evicted + refused > 0, "no limit was reached"
    assert ratio >= LEAST_RATE, f"only {ratio:.3f} of the unlimited store's hits"
    written = {
        name: sum(usage.sim.written.values()) for name, usage in zip("ul", week.usages, strict=True)
    }
    return {
        "requests": week.requests,
        "share": share,
        "daily_share": daily_share,
        "unlimited_rate": oracle.rate,
        "limited_rate": limited.rate,
        "ratio": ratio,
        "writes": written["l"] / written["u"],
        "evicted": limited.sim.machine.evicted,
        "counts": dict(limited.sim.counts),
    }


def _try(seed: int) -> tuple[int, dict[str, Any] | str]:
    try:
        return seed, run(seed)
    except Exception:  # noqa: BLE001 - the other seeds still run
        return seed, traceback.format_exc()


def summary(results: dict[int, dict[str, Any] | str], seconds: float) -> dict[str, Any]:
    """Return the sums of all weeks, and the seeds that failed with the reason."""
    good = [it for it in results.values() if isinstance(it, dict)]
    counts: Counter[str] = Counter()
    for one in good:
        counts.update(one["counts"])
    ratios = sorted(one["ratio"] for one in good)
    return {
        "seeds": len(results),
        "failed": {seed: it for seed, it in results.items() if isinstance(it, str)},
        "requests": sum(one["requests"] for one in good),
        "least_ratio": ratios[0] if ratios else None,
        "median_ratio": ratios[len(ratios) // 2] if ratios else None,
        "daily_writes_bind": sum("refused: daily_writes" in one["counts"] for one in good),
        "evicted": sum(one["evicted"] for one in good),
        "counts": dict(counts),
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.prefix_week", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    started, results = time.monotonic(), {}
    last = options.first if options.last is None else options.last
    with ProcessPoolExecutor(options.processes) as pool:
        for seed, result in pool.map(_try, range(options.first, last + 1)):
            results[seed] = result
            if isinstance(result, str):
                sys.stdout.write(f"seed {seed} failed:\n{result}\n")
                sys.stdout.flush()
    found = summary(results, time.monotonic() - started)
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
