"""A follower of a gang: applies the leader's records to its own part of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import mlx.core as mx
import msgspec

from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.step_down import ModelStepDown, PoolTrimming
from kvd.worker.device import launches_in_order, on_cuda
from kvd.worker.gang import records
from kvd.worker.gang.control import Diverged, FollowerPeers
from kvd.worker.gang.digest import digest_of
from kvd.worker.gang.part import load_part
from kvd.worker.gang.ticks import Ticks
from kvd.worker.process import shortage
from kvd.worker.process.freed_buffers import FreedBuffers
from kvd.worker.serving import loading
from kvd.worker.serving.runner import Runner
from kvd.worker.serving.step_inputs import StepInputs
from kvd.worker.text.failures import one_line

_log = logging.getLogger("kvd.worker")
LEADER_SECONDS = 5.0
"""Seconds after a failed load within which the leader should have ended with its own report."""
_read = msgspec.msgpack.Decoder(records.Numbered).decode


def run(peers: FollowerPeers, group: Any) -> NoReturn:
    """Load a part of the model that the leader names, then apply records until the leader ends.

    Raises `PeerLost` when the leader ends, `Diverged` if this rank would compute something else
    than the leader, and all errors of the load and of steps, such as a shortage of memory.
    """
    load = msgspec.msgpack.decode(peers.receive(), type=records.Load)
    try:
        runner = load_part(load, peers, group)
    except Exception as error:
        # The leader's load fails for the same reason, and its exit ends this process. An earlier
        # exit would end the leader before it has reported the reason.
        _log.warning("rank %d cannot load its part: %s", peers.rank, one_line(error))
        time.sleep(LEADER_SECONDS)
        raise
    follower = Follower(runner, group, FreedBuffers(loading.freed_bytes(load.command)))
    while True:
        follower.apply(_read(peers.receive()))


class Follower:
    """The rows and snapshots of one follower. ``runner`` has an empty cache."""

    def __init__(self, runner: Runner, group: Any, freed_buffers: FreedBuffers) -> None:
        self._freed_buffers = freed_buffers
        self._runner = runner
        self._cache = runner.cache
        self._group = group
        self._number = 0
        self._rows: dict[int, SequenceRow] = {}
        self._snapshots: dict[int, SequenceSnapshot] = {}
        self._drawn: mx.array | None = None
        """Tokens that the previous decode step has drawn, ``[rows]`` int32, lazy."""
        self._parts: Iterator[mx.array] = iter(())
        """Logits of the chunk that was scored last, in parts; see `Runner.score_parts`."""
        self._work: ModelStepDown | PoolTrimming | None = None

    def apply(self, numbered: records.Numbered) -> None:
        """Apply the next record. Raises `Diverged`, with nothing computed, if it does not fit."""
        self._number += 1
        if numbered.number != self._number:
            raise Diverged(f"record {numbered.number} came instead of {self._number}")
        record = numbered.record
        self._cache.limit_bytes = numbered.limit_bytes
        if numbered.digest:
            self._compare(numbered)
        match record:
            case records.Decode():
                self._decode(record)
            case records.Free():
                self._cache.free(self._rows.pop(record.row), clean=record.clean)
            case records.NewRow():
                self._rows[record.row] = self._cache.new_row(record.level, record.coming)
            case records.Drop():
                self._cache.snapshots.drop(self._snapshots.pop(record.snapshot))
            case records.Take() if on_cuda() and launches_in_order():  # the pass may still run
                self._keep(record)
            case _:
                self._wait()
                if not (self._pass(record) or self._give_back(record)):
                    self._keep(record)

    def _compare(self, numbered: records.Numbered) -> None:
        rows = self._named_rows(numbered.record)
        if digest_of(self._cache, rows) != numbered.digest:
            places = [
                (row.length, *((one.slot, one.level, one.pages[-2:]) for one in row.rows))
                for row in rows
            ]
            raise Diverged(
                f"before record {numbered.number} ({type(numbered.record).__name__}), the rows'"
                f" places in the cache differ from the leader's; here, the first are {places[:4]}"
            )

    def _named_rows(self, record: records.Record) -> list[SequenceRow]:
        match record:
            case records.Flush():
                return list(self._cache.sequences)
            case records.Score() | records.Take():
                return [self._rows[record.row]]
            case records.Decode() | records.Prefill() | records.PrefillHidden():
                return [self._rows[row] for row in record.rows]
            case records.StepDown():
                return [self._rows[row] for row in record.rows if row in self._rows]
        raise Diverged(f"a record of type {type(record).__name__} has a digest")

    def _wait(self) -> None:
        """Wait for the step or pass in flight; its collectives end when all have launched it."""
        drawn = [] if self._drawn is None else [self._drawn]
        mx.eval(drawn, self._cache.arrays())
        self._cache.wait()

    def _decode(self, record: records.Decode) -> None:
        """Launch a step as the leader does; the tokens that it draws arrive through the graph."""
        self._freed_buffers.prepare(prefills=False)
        rows = [self._rows[row] for row in record.rows]
        inputs = StepInputs(record.known, record.places, record.draws, self._drawn)
        logits = self._runner.launch(rows, inputs)
        mx.async_eval(logits, self._cache.arrays())  # type: ignore[no-untyped-call]
        self._cache.snapshots.evaluate()
        self._drawn = None
        if record.draws:
            # After the step's own collectives: the leader's tokens depend on all of them.
            (zeros,) = mx.depends([mx.zeros((record.draws,), mx.int32)], [logits])
            self._drawn = mx.distributed.all_sum(zeros, group=self._group)
            mx.async_eval(self._drawn)  # type: ignore[no-untyped-call]

    # Records that need an idle device.

    def _pass(self, record: records.Record) -> bool:
        """Prefill chunks, if that is what the record asks for."""
        runner, rows = self._runner, self._rows
        if isinstance(record, records.Prefill | records.PrefillHidden | records.Score):
            self._freed_buffers.prepare(prefills=True)
        match record:
            case records.Prefill():
                named = [rows[row] for row in record.rows]
                runner.prefill_pass(named, record.chunks, later=record.later, waits=False)
            case records.PrefillHidden():
                runner.prefill_hidden([rows[row] for row in record.rows], record.chunks)
            case records.Score():
                self._parts = runner.score_parts(rows[record.row], record.tokens)
            case records.ScoreNext():
                next(self._parts, None)
            case _:
                return False
        return True

    def _give_back(self, record: records.Record) -> bool:
        """Free memory, if that is what the record asks for."""
        match record:
            case records.Compact():
                self._cache.compact(record.pages)
            case records.CutTails():
                self._cache.cut_tails()
            case records.Shrink():
                self._cache.shrink(record.pages)
            case records.GiveBack():
                shortage.give_back()
            case records.StepDown():
                held = self._rows | self._snapshots
                self._work = self._runner.step_down(
                    [held[number] for number in record.rows], record.level
                )
            case records.TrimPools():
                self._work = self._runner.trim_pools()
            case records.Work() if self._work is not None:
                self._work.advance(record.ticks, Ticks())
            case _:
                return False
        return True

    def _keep(self, record: records.Record) -> None:
        """Flush pages, grow pools, or copy between rows and snapshots."""
        cache = self._cache
        match record:
            case records.Flush():
                cache.flush()
            case records.MakeRoom():
                cache.make_room(record.ticks, Ticks())
            case records.MakeIdleRoom():
                cache.make_idle_room(record.pages)
            case records.Take():
                snapshot = cache.snapshots.take(self._rows[record.row], record.tokens)
                self._snapshots[record.snapshot] = snapshot
            case records.Restore():
                snapshot = self._snapshots[record.snapshot]
                self._rows[record.row] = cache.restore(snapshot, record.coming)
            case _:
                raise Diverged(f"a record of type {type(record).__name__} came at a wrong time")
