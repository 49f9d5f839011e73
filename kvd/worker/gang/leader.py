"""The leader's runner and cache: what the engine calls there is also sent to the followers.

`LeaderRunner` and `LeaderCache` stand in front of the runner and the cache of this process. Each
call that runs the model or changes the cache is sent first, with a digest of the rows' places in
the cache. Calls within the runner are not sent: every rank makes them itself. Byte counts are the
sums of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.step_down import ModelStepDown, PoolTrimming
from kvd.worker.gang import records, ring
from kvd.worker.gang.control import Channel, LeaderPeers
from kvd.worker.gang.digest import digest_of
from kvd.worker.gang.startup import Place
from kvd.worker.gang.summed import Summed
from kvd.worker.gang.ticks import WORK_TICKS, Ticks
from kvd.worker.process import shortage
from kvd.worker.serving.runner import Row, Runner
from kvd.worker.serving.step_inputs import StepInputs
from protocol.worker import LoadModel


@dataclass(frozen=True)
class Gang:
    """The leader's gang: its followers, and the group of MLX that all ranks have joined."""

    peers: LeaderPeers
    group: Any

    @staticmethod
    def join(place: Place) -> Gang:
        """Join the other ranks, which must do so at the same time; see `ring.join`."""
        peers = LeaderPeers([Channel(sock) for sock in place.controls])
        return Gang(peers, ring.join(place, peers))

    def begin(self, command: LoadModel, path: Path, vocab_size: int, *, native: bool) -> None:
        """Let the followers load their parts of a model, whose memory must be granted already.

        ``native``: whether the native library is used. It must be built already.
        """
        self.peers.send(records.Load(command, str(path), vocab_size, native))


class Sender:
    """Sends numbered records about one cache, and gives numbers to its rows and snapshots."""

    def __init__(self, peers: LeaderPeers, cache: ModelCache) -> None:
        self.ranks = peers.size
        self._peers = peers
        self._cache = cache
        self._number = 0
        self._ids: dict[SequenceRow | SequenceSnapshot, int] = {}
        self._next_id = 0

    def send(self, record: records.Record, rows: list[SequenceRow] | None = None) -> None:
        """Send a record. The followers first compare the places of ``rows`` in the cache."""
        self._number += 1
        digest = digest_of(self._cache, rows) if rows else 0
        limit = self._cache.limit_bytes
        self._peers.send(records.Numbered(self._number, digest, limit, record))

    def add(self, item: SequenceRow | SequenceSnapshot) -> None:
        """Give an item the number that `coming` has announced."""
        self._ids[item] = self._next_id
        self._next_id += 1

    @property
    def coming(self) -> int:
        """Number of the next row or snapshot."""
        return self._next_id

    def id_of(self, item: SequenceRow | SequenceSnapshot) -> int:
        return self._ids[item]

    def ids_of(self, rows: Sequence[SequenceRow | SequenceSnapshot]) -> list[int]:
        return [self._ids[row] for row in rows]

    def forget(self, item: SequenceRow | SequenceSnapshot) -> None:
        del self._ids[item]


class LeaderSnapshots(Summed):
    """`SequenceSnapshots` of all ranks."""

    def __init__(self, cache: ModelCache, sender: Sender) -> None:
        super().__init__(cache.snapshots, sender.ranks)
        self._sender = sender

    def take(self, row: SequenceRow, tokens: int | None = None) -> SequenceSnapshot:
        length = row.length if tokens is None else tokens
        self._sender.send(records.Take(self._sender.coming, self._sender.id_of(row), length), [row])
        snapshot: SequenceSnapshot = self._one.take(row, length)
        self._sender.add(snapshot)
        return snapshot

    def drop(self, snapshot: SequenceSnapshot) -> None:
        self._sender.send(records.Drop(self._sender.id_of(snapshot)))
        self._one.drop(snapshot)
        self._sender.forget(snapshot)


class LeaderCache(Summed):
    """`ModelCache` of all ranks."""

    def __init__(self, cache: ModelCache, sender: Sender) -> None:
        super().__init__(cache, sender.ranks)
        self._sender = sender
        self.snapshots = LeaderSnapshots(cache, sender)
        self.costs = Summed(cache.costs, sender.ranks)
        self.usage = Summed(cache.usage, sender.ranks)

    @property
    def limit_bytes(self) -> int | None:
        limit: int | None = self._one.limit_bytes
        return None if limit is None else limit * self._ranks

    @limit_bytes.setter
    def limit_bytes(self, value: int | None) -> None:
        self._one.limit_bytes = None if value is None else value // self._ranks

    def new_row(self, level: int = 0, coming: int = 1) -> SequenceRow:
        self._sender.send(records.NewRow(self._sender.coming, level, coming))
        row: SequenceRow = self._one.new_row(level, coming)
        self._sender.add(row)
        return row

    def restore(self, snapshot: SequenceSnapshot, coming: int = 1) -> SequenceRow:
        source = self._sender.id_of(snapshot)
        self._sender.send(records.Restore(self._sender.coming, source, coming))
        row: SequenceRow = self._one.restore(snapshot, coming)
        self._sender.add(row)
        return row

    def free(self, row: SequenceRow, *, clean: bool = True) -> None:
        self._sender.send(records.Free(self._sender.id_of(row), clean))
        self._one.free(row, clean=clean)
        self._sender.forget(row)

    def flush(self) -> None:
        self._sender.send(records.Flush(), self._one.sequences)
        self._one.flush()

    def make_room(self, seconds: float, clock: Callable[[], float]) -> None:
        end = clock() + seconds
        while self._one.lacks_room():
            self._sender.send(records.MakeRoom(1))
            self._one.make_room(1, Ticks())
            if clock() >= end:
                return

    def make_idle_room(self, pages: int) -> None:
        self._sender.send(records.MakeIdleRoom(pages))
        self._one.make_idle_room(pages)

    def compact(self, pages: int = 0) -> int:
        self._sender.send(records.Compact(pages))
        freed: int = self._one.compact(pages)
        return freed * self._ranks

    def cut_tails(self) -> None:
        self._sender.send(records.CutTails())
        self._one.cut_tails()

    def shrink(self, pages: int = 0) -> None:
        self._sender.send(records.Shrink(pages))
        self._one.shrink(pages)

    def ask_followers_to_give_back(self) -> None:
        self._sender.send(records.GiveBack())


class _Work:
    """A step-down or a trimming that has begun on all ranks."""

    def __init__(self, work: ModelStepDown | PoolTrimming, sender: Sender) -> None:
        self._work = work
        self._sender = sender

    @property
    def over(self) -> bool:
        return self._work.over

    def advance(self, seconds: float, clock: Callable[[], float]) -> None:
        """Work for about ``seconds``, in spans of `WORK_TICKS`. The device must be idle."""
        end = clock() + seconds
        while not self._work.over:
            self._sender.send(records.Work(WORK_TICKS))
            self._work.advance(WORK_TICKS, Ticks())
            if clock() >= end:
                return


class LeaderRunner:
    """`Runner` of all ranks, for the engine."""

    interleaves = False
    """The number of decode steps between the stages of a pass would depend on time."""
    draws_late = False
    """The other ranks know how many tokens a step draws when it is launched."""

    def __init__(self, runner: Runner, gang: Gang) -> None:
        self._runner = runner
        self._group = gang.group
        self._sender = Sender(gang.peers, runner.cache)
        self.cache = LeaderCache(runner.cache, self._sender)

    @property
    def packs(self) -> bool:
        return self._runner.packs

    @property
    def splits_head(self) -> bool:
        return self._runner.splits_head

    @property
    def compiled(self) -> bool:
        return self._runner.compiled

    @property
    def launches(self) -> int:
        return self._runner.launches

    def pass_tokens(self, chunk: int, *, alone: bool = True) -> int:
        return self._runner.pass_tokens(chunk, alone=alone)

    # Steps.

    def launch(self, rows: list[Row], inputs: StepInputs) -> mx.array:
        ids = self._sender.ids_of(rows)
        record = records.Decode(ids, inputs.known, inputs.places, inputs.draws)
        self._sender.send(record, rows)
        return self._runner.launch(rows, inputs)

    def share_tokens(self, tokens: mx.array) -> mx.array:
        # Exact: the followers add zeros.
        found: mx.array = mx.distributed.all_sum(tokens, group=self._group)
        return found

    def prefill(self, row: Row, tokens: list[int]) -> None:
        self.prefill_pass([row], [tokens])

    def prefill_pass(
        self,
        rows: list[Row],
        chunks: list[list[int]],
        *_: Any,
        later: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._sender.send(records.Prefill(self._sender.ids_of(rows), chunks, later), rows)
        self._runner.prefill_pass(rows, chunks, later=later, meanwhile=meanwhile)

    def prefill_hidden(self, rows: list[Row], chunks: list[list[int]], *_: Any) -> list[mx.array]:
        self._sender.send(records.PrefillHidden(self._sender.ids_of(rows), chunks), rows)
        return self._runner.prefill_hidden(rows, chunks)

    def score_parts(self, row: Row, tokens: list[int], *_: Any) -> Iterator[mx.array]:
        self._sender.send(records.Score(self._sender.id_of(row), tokens), [row])
        return self._each(self._runner.score_parts(row, tokens))

    def _each(self, parts: Iterator[mx.array]) -> Iterator[mx.array]:
        """Yield the parts of a chunk's logits, which all ranks compute."""
        while True:
            self._sender.send(records.ScoreNext())
            if (part := next(parts, None)) is None:
                return
            yield part
            del part  # the logits

    # Giving memory back.

    def step_down(self, rows: list[Row | SequenceSnapshot], level: int) -> _Work:
        running = [row for row in rows if isinstance(row, SequenceRow)]
        self._sender.send(records.StepDown(self._sender.ids_of(rows), level), running)
        return _Work(self._runner.step_down(rows, level), self._sender)

    def trim_pools(self) -> _Work:
        self._sender.send(records.TrimPools())
        return _Work(self._runner.trim_pools(), self._sender)


def give_back(cache: Any) -> None:
    """Return free memory of all processes of a model to the system.

    ``cache``: the engine's, on an idle device.
    """
    if isinstance(cache, LeaderCache):
        cache.ask_followers_to_give_back()
    shortage.give_back()


EngineRunner = Runner | LeaderRunner
"""What the engine runs steps with."""
