"""What the engine calls on the cache is sent to the followers, unless it only reads."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import pytest

import kvd.worker.core
from kvd.worker.cache import model_cache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.sequence_snapshots import SequenceSnapshots
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.core import reclaiming
from kvd.worker.gang import follower as follower_module
from kvd.worker.gang import leader as leader_module
from kvd.worker.gang import records
from kvd.worker.gang.follower import Follower
from kvd.worker.gang.leader import LeaderCache, LeaderRunner, LeaderSnapshots, give_back
from kvd.worker.process import shortage
from kvd.worker.process.freed_buffers import FreedBuffers
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from kvd.worker.serving.step_inputs import StepInputs
from tests.worker.architectures.zoo import build
from tests.worker.core.driver import Driver

pytestmark = pytest.mark.mlx

READS = {
    "arrays", "charge_of", "charged_bytes", "costs", "evaluate", "freed_bytes", "held_bytes",
    "lacks_room", "levels", "limit_bytes", "nbytes", "needs_flush", "row_bytes",
    "sequences", "settings", "snapshot_charge", "stage_ends", "tail_slots", "unlowered", "usage",
}  # fmt: skip
"""Attributes of the cache and of its snapshots that change nothing, or no result."""
OFF = {"discard", "undo_prefill", "add"}
"""What a gang never calls: it repeats no failed step, and reads no snapshots from disk."""


def used(name: str) -> set[str]:
    """Return the attributes of every ``cache`` or ``snapshots`` that the engine's code names."""
    files = [*Path(kvd.worker.core.__path__[0]).glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in found
        if (isinstance(node.value, ast.Attribute) and node.value.attr.lstrip("_") == name)
        or (isinstance(node.value, ast.Name) and node.value.id == name)
    }


@pytest.mark.parametrize(
    ("name", "plain", "leader"),
    [
        ("cache", ModelCache, LeaderCache),
        ("snapshots", SequenceSnapshots, LeaderSnapshots),
    ],
)
def test_every_change_is_sent(name, plain, leader):
    own = {attribute for attribute in dir(leader) if attribute in vars(leader)}
    own |= {"snapshots"}
    methods = {one for one in used(name) if callable(getattr(plain, one, None))}
    assert methods
    assert methods - own - READS - OFF == set()
    assert not own & OFF


class Peers:
    """Passes the leader's records to a follower in this process, encoded as they are sent."""

    size = 2

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.sent: list[records.Record] = []

    def send(self, message: Any) -> None:
        encoded = msgspec.msgpack.encode(message)
        numbered = msgspec.msgpack.decode(encoded, type=records.Numbered)
        self.sent.append(numbered.record)
        self._follower.apply(numbered)


@pytest.fixture
def leader() -> LeaderRunner:
    """Return the leader of a gang whose follower is in this process."""
    model = build("llama")[0]
    settings = CacheSettings(schemes=(Scheme(8, 8, 32, 32), Scheme(4, 4, 32, 32)))
    runners = [Runner(model, ModelCache(find_layout(model), settings)) for _ in range(2)]
    gang: Any = SimpleNamespace(
        peers=Peers(Follower(runners[1], None, FreedBuffers(1 << 30))), group=None
    )
    return LeaderRunner(runners[0], gang)


def test_all_ranks_give_freed_buffers_back(leader: LeaderRunner, monkeypatch: pytest.MonkeyPatch):
    given: list[str] = []
    for rank, module in (("leader", leader_module), ("follower", follower_module)):
        instead = SimpleNamespace(give_back=lambda rank=rank: given.append(rank))
        monkeypatch.setattr(module, "shortage", instead)
    give_back(leader.cache)

    assert given == ["follower", "leader"]


def test_followers_leave_room_for_steps_in_all_passes(leader: LeaderRunner) -> None:
    follower = leader._sender._peers._follower
    prepared: list[bool] = []
    follower._freed_buffers = SimpleNamespace(prepare=lambda *, prefills: prepared.append(prefills))
    row = leader.cache.new_row()
    leader.prefill_pass([row], [[1, 2, 3]])
    list(leader.score_parts(row, [4, 5]))
    assert prepared == [True, True]
    mx.eval(leader.launch([row], StepInputs.of([6], 0)))
    assert prepared == [True, True, False]


@pytest.mark.parametrize("cuda", [True, False])
def test_followers_take_snapshots_while_a_pass_runs_on_cuda(
    leader: LeaderRunner, monkeypatch: pytest.MonkeyPatch, *, cuda: bool
) -> None:
    """A snapshot does not wait for the pass there. The next pass and the flush do."""
    monkeypatch.setattr(follower_module, "on_cuda", lambda: cuda)
    for module in (follower_module, model_cache):
        monkeypatch.setattr(module, "launches_in_order", lambda: True)
    follower = leader._sender._peers._follower
    waits: list[int] = []
    wait = follower._cache.wait

    def waited() -> None:
        waits.append(follower._number)
        wait()

    monkeypatch.setattr(follower._cache, "wait", waited)
    row = leader.cache.new_row()
    snapshots = []
    leader.prefill_pass([row], [[1, 2, 3]])
    first = follower._number
    leader.prefill_pass(
        [row], [[4] * 64], meanwhile=lambda: snapshots.append(leader.cache.snapshots.take(row))
    )
    taken = follower._number
    leader.cache.flush()

    assert waits == [first, first + 1, *([] if cuda else [taken]), taken + 1]
    (kept,), (own,) = follower._snapshots.values(), snapshots
    for left, right in zip(kept.rows[0].tails, own.rows[0].tails, strict=True):
        assert all(mx.array_equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("method", ["spare", "prefixes", "preempt"])
def test_a_reclaim_gives_back_on_all_ranks(
    demo: Driver, monkeypatch: pytest.MonkeyPatch, method: str
):
    given: list[object] = []
    monkeypatch.setattr(reclaiming, "give_back", given.append)
    demo.reclaim(method, 1 << 20)

    assert given == [demo.engine._runner.cache]


def test_rows_and_snapshots_step_down_on_all_ranks(leader: LeaderRunner):
    follower = leader._sender._peers._follower
    caches = leader.cache, follower._cache
    row = leader.cache.new_row()
    leader.prefill(row, list(range(200)))
    snapshot = leader.cache.snapshots.take(row)
    leader.prefill(row, list(range(100)))
    work = leader.step_down([row, snapshot], 1)
    while not work.over:
        work.advance(1.0, time.monotonic)

    for cache in caches:
        (running,), (kept,) = cache.sequences, cache.snapshots.all
        for one in (*running.rows, *kept.rows):
            assert {one.level, *(page.level for page in one.pages)} == {1}


def test_freed_buffers_are_given_back():
    mx.eval(mx.zeros((1 << 20,)) + 1)
    assert mx.get_cache_memory() > 0
    shortage.give_back()

    assert mx.get_cache_memory() == 0
