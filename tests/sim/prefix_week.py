"""A simulated week of agents on five models, and what a prefix store saves of their prefill.

Agents of one kind begin with a common prompt. Conversations grow turn by turn, are sometimes forked
and mostly abandoned; a few are continued hours or days later. Workers lose their memory
several times a day. A second store without limits shows what could have been saved::

    python -m tests.sim.prefix_week [SEED [SHARE_OF_BYTES [SHARE_OF_DAILY_WRITES]]]
"""

from __future__ import annotations

import hashlib
import heapq
import sys
from dataclasses import dataclass
from random import Random

from actors.machines import prefix_store_events as ev
from actors.machines.prefix_store import PrefixStore
from actors.machines.segment_index import SegmentIndex
from actors.machines.segment_writes import DAY_S
from protocol import worker as wire
from protocol.segments import SegmentInfo

MODELS = 5
KINDS = 4
"""Kinds of agents per model, each with its own common prompt."""
AGENTS = 2
"""Agents that work with a model at a time."""
CHUNK = 256
UNLIMITED = 2**62


class StoreSim:
    """A store whose disk answers at once. Checks after every event what must never happen."""

    def __init__(self, limits: ev.StoreLimits) -> None:
        self.machine = PrefixStore()
        self.limits = limits
        self.files: dict[bytes, int] = {}
        self.allowed: dict[bytes, bool] = {}
        self.written: dict[int, int] = {}
        self.refused: dict[str, int] = {}
        self.now = 0.0
        self.handle(ev.LimitsChanged(limits))

    def handle(self, event: ev.Event) -> None:
        events = [event]
        while events:
            commands = self.machine.handle(events.pop(0), self.now)
            events += filter(None, map(self._execute, commands))

    def report(self, life: int, report: wire.SegmentReport) -> None:
        self.handle(ev.Reported(f"m{life}", life, report))

    def _execute(self, command: ev.Command) -> ev.DiskEvent | None:
        match command:
            case ev.OpenStore(seq=seq):
                return ev.StoreOpened(seq, SegmentIndex(), {}, {})
            case ev.MakeRoom(key=key, evicted=evicted):
                self._delete(evicted)
                return ev.RoomMade(key, evicted, UNLIMITED)
            case ev.DeleteSegments(keys=keys, ticket=ticket):
                self._delete(keys)
                return ev.SegmentsDeleted(keys, ticket)
            case ev.SendToWorker(command=wire.SegmentAllowed(key=key, allowed=allowed)):
                self.allowed[key] = allowed
            case ev.Refused(reason=reason):
                self.refused[reason] = self.refused.get(reason, 0) + 1
            case ev.Synchronize():
                return ev.FreeBytesRead(UNLIMITED)
            case _:
                pass
        return None

    def _delete(self, keys: list[bytes]) -> None:
        for key in keys:
            del self.files[key]

    def offer(self, life: int, segment: SegmentInfo, hits: int) -> bool:
        """Offer a segment and write it if that is allowed; return whether it is stored now."""
        self.report(life, wire.SegmentOffered(segment=segment, hits=hits))
        if not self.allowed.pop(segment.key):
            return segment.key in self.machine.index
        self.files[segment.key] = segment.nbytes
        day = int(self.now // DAY_S)
        self.written[day] = self.written.get(day, 0) + segment.nbytes
        assert sum(self.files.values()) <= self.limits.limit_bytes, "more bytes than the limit"
        assert self.written[day] <= self.limits.daily_bytes, "more writes than a day may have"
        self.report(life, wire.SegmentWritten(segment=segment, seconds=0.1))
        return True

    def check(self) -> None:
        self.machine.check()
        assert self.machine.stored_bytes == sum(self.files.values()), "bytes are counted wrongly"


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
    """Feeds the same traffic to several stores."""

    def __init__(self, seed: int, *limits: ev.StoreLimits) -> None:
        self.random = Random(seed)
        self.usages = [Usage(StoreSim(one)) for one in limits]
        self.memory: list[dict[bytes, int]] = [{} for _ in range(MODELS)]
        """Prefixes in each worker's memory, and how often prompts continued from them."""
        self.page_bytes = [self.random.randrange(8, 64) * 1024 for _ in range(MODELS)]
        """Bytes of a token."""
        self.waiting: list[tuple[float, int, Conversation]] = []
        self.resting: list[list[Conversation]] = [[] for _ in range(MODELS)]
        """Conversations that may be continued later."""
        self.count = 0
        self.requests = 0
        for usage in self.usages:
            for life in range(MODELS):
                usage.sim.report(life, wire.SegmentsOpened(space=bytes([life]) * 16))

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
                self.memory[model].clear()
                forget_at[model] = now + self.random.expovariate(1 / (4 * 3600))
            for usage in self.usages:
                usage.sim.now = now
            self._turn(conversation)
            self._continue(conversation, now)
        for usage in self.usages:
            usage.sim.check()

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
        stored = [one for one in path if one[0] in usage.sim.machine.index]
        key, found = stored[-1] if stored else (b"", 0)
        if in_memory < path[-1][1]:  # memory has lost it
            usage.queried += tokens - in_memory
            usage.restored += max(0, found - in_memory)
        if found > in_memory:
            used = wire.SegmentUsed(key=key, tokens=found, seconds=0.1, prefill_s=found / 1000)
            usage.sim.report(it.model, used)

    def _offer(self, usage: Usage, it: Conversation) -> None:
        """Offer all prefixes on the prompt's path that are not stored, shortest first."""
        base, above = None, 0
        for key, tokens in it.ends:
            stored = key in usage.sim.machine.index
            if not stored:
                nbytes = (tokens - above) * self.page_bytes[it.model]
                segment = SegmentInfo(key=key, base=base, tokens=tokens, nbytes=nbytes)
                stored = usage.sim.offer(it.model, segment, self.memory[it.model].get(key, 0))
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


def compare(seed: int, share: float, daily_share: float = 2.0, days: float = 7.0) -> Week:
    """Run a week with a limit of ``share`` of the bytes that an unlimited store would keep.

    ``daily_share``: the daily writes, relative to those of the unlimited store.
    """
    unlimited = ev.StoreLimits(UNLIMITED, UNLIMITED, 0)
    oracle = Week(seed, unlimited)
    oracle.run(days)
    total = oracle.usages[0].sim.machine.stored_bytes
    limits = ev.StoreLimits(int(total * share), int(total / days * daily_share), 0)
    week = Week(seed, unlimited, limits)
    week.run(days)
    return week


def main(arguments: list[str]) -> None:
    """Print how much of the unlimited store's savings a limited one has."""
    seed, share, daily = [*map(float, arguments), *(7, 1 / 3, 2.0)[len(arguments) :]]
    week = compare(int(seed), share, daily)
    oracle, limited = (usage.sim for usage in week.usages)
    rates = [usage.rate for usage in week.usages]
    writes = sum(limited.written.values()) / sum(oracle.written.values())
    sys.stdout.write(
        f"{week.requests} requests; unlimited: {oracle.machine.stored_bytes / 1e9:.0f} GB,"
        f" {rates[0]:.3f} of the lost tokens restored; limited: {rates[1]:.3f},"
        f" {rates[1] / rates[0]:.3f} of that; {writes:.2f} of the writes;"
        f" refused {limited.refused}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
