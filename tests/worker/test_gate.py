"""The worker's side of the turns: open and silent alone, closed until its turn beside others."""

from __future__ import annotations

import pytest

from kvd.worker.fake_engine import FakeEngine
from kvd.worker.gate import Gate, wanted
from protocol.worker import (
    CancelRow,
    Entered,
    RowTokens,
    Stop,
    Turn,
    TurnOver,
    TurnWanted,
)
from tests.worker.peer import Thread, submit


@pytest.mark.parametrize(
    ("mode", "device", "on"),
    [
        ("auto", "cpu", False),
        ("auto", "none", False),
        ("auto", "Apple M4 Max", True),
        ("on", "cpu", True),
        ("off", "NVIDIA H200", False),
    ],
)
def test_turns_are_for_accelerators_unless_somebody_says_otherwise(mode, device, on):
    assert wanted(mode, device) is on


def test_who_takes_no_turns_says_nothing():
    gate = Gate(on=False)

    assert gate.begin() is None
    assert gate.is_open
    assert gate.rest(1e9) is None


def test_work_is_told_once_and_done_at_once():
    gate = Gate(on=True)

    assert gate.begin() == TurnWanted()
    assert gate.begin() is None
    assert gate.is_open
    assert gate.is_free
    assert gate.rest(6.0) == TurnOver(seq=0, used_s=0.0, more=False)
    assert gate.rest(6.0) is None


def test_a_slice_ends_with_the_step_in_which_it_ends():
    gate = Gate(on=True)
    gate.begin()

    assert gate.take(Turn(seq=3, slice_s=0.05), 10.0) is None
    assert gate.stepped(10.04) is None
    assert gate.is_open
    over = gate.stepped(10.07)
    assert over == TurnOver(seq=3, used_s=pytest.approx(0.07), more=True)
    assert not gate.is_open
    assert gate.rest(11.0) == TurnOver(seq=3, used_s=0.0, more=False)


def test_a_turn_that_is_read_late_is_good_for_one_step():
    gate = Gate(on=True)
    gate.begin()
    gate.take(Turn(seq=1, slice_s=0.05), 10.0)

    assert gate.is_open
    assert gate.stepped(12.0) == TurnOver(seq=1, used_s=2.0, more=True)
    assert gate.stepped(13.0) is None


def test_who_is_told_to_wait_waits_until_it_is_free():
    gate = Gate(on=True)
    gate.begin()
    gate.take(Turn(seq=1, slice_s=0.0), 10.0)

    assert not gate.is_open
    assert gate.take(Turn(seq=2, slice_s=None), 99.0) is None
    assert gate.is_open


def test_a_turn_that_comes_too_late_goes_back():
    gate = Gate(on=True)
    gate.begin()
    gate.rest(1.0)

    assert gate.take(Turn(seq=2, slice_s=0.05), 2.0) == TurnOver(seq=2, used_s=0.0, more=False)
    assert gate.begin() == TurnWanted()
    assert not gate.is_open


def _rested(peer: Thread) -> bool:
    return any(not report.more for report in peer.of(TurnOver))


@pytest.fixture
def peer():
    it = Thread(FakeEngine())
    yield it
    it.close()


def test_a_worker_that_waits_for_its_turn_hears_commands(peer):
    peer.load("fake:tps=0", turns="on")
    peer.send(Turn(seq=1, slice_s=0.0), submit("a", max_tokens=8), submit("b", max_tokens=8))
    peer.wait_for(lambda: peer.of(TurnWanted))
    peer.send(CancelRow(rid="a"))
    peer.wait_for(lambda: [one.phase for one in peer.of(Entered)][-1:] == ["idle"])
    assert not peer.of(RowTokens)

    peer.send(Turn(seq=2, slice_s=5.0))
    a, b = peer.wait_for_end("a", "b")
    assert (a.reason, b.reason) == ("cancelled", "length")
    peer.wait_for(lambda: _rested(peer))


def test_a_worker_passes_its_turn_on_between_two_steps(peer):
    peer.load("fake:tps=0,pages=4000", turns="on")
    rids = [f"r{row}" for row in range(8)]
    peer.send(Turn(seq=1, slice_s=0.0), *(submit(rid, max_tokens=10_000) for rid in rids))
    peer.wait_for(lambda: peer.of(TurnWanted))
    for seq in (2, 3, 4):
        peer.send(Turn(seq=seq, slice_s=0.003))
        over = peer.wait_for(lambda seq=seq: [r for r in peer.of(TurnOver) if r.seq == seq])[0]
        assert over.more
        assert 0.003 <= over.used_s < 5.0
    assert 0 < len(peer.tokens("r0")) < 10_000
    peer.send(Stop(drain=False))
    peer.read_all()
    assert peer.join() == "done"


def test_nobody_hears_of_turns_where_they_are_off(peer):
    peer.load("fake:tps=0", turns="off")
    peer.send(submit("a", max_tokens=8))
    peer.wait_for_end("a")

    assert not peer.of(TurnWanted)
