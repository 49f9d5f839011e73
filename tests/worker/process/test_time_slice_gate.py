"""The worker's side of the turns: open and silent alone, closed until its turn beside others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.fake.engine import FakeEngine
from kvd.worker.process.time_slice_gate import TimeSliceGate, uses_time_slices
from protocol.worker import (
    LONG_STEP_S,
    CancelRow,
    PhaseChanged,
    RowTokens,
    Stop,
    TimeSlice,
    TimeSliceOver,
    TimeSliceRequested,
)
from tests.worker.process.peer import Thread, submit


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
    assert uses_time_slices(mode, device) is on


def test_who_takes_no_turns_says_nothing():
    gate = TimeSliceGate(on=False)

    assert gate.request_slice(prefills=False) is None
    assert gate.is_open
    assert gate.work_done(1e9) is None


def test_work_is_told_once_and_done_at_once():
    gate = TimeSliceGate(on=True)

    assert gate.request_slice(prefills=False) == TimeSliceRequested()
    assert gate.request_slice(prefills=False) is None
    assert gate.is_open
    assert gate.is_unlimited
    assert gate.work_done(6.0) == TimeSliceOver(seq=0, used_s=0.0, more=False)
    assert gate.work_done(6.0) is None


def step(
    gate: TimeSliceGate, start: float, seconds: float
) -> list[TimeSliceOver | TimeSliceRequested]:
    return [said for said in (gate.before_step(start), gate.after_step(start + seconds)) if said]


def test_a_slice_of_long_steps_ends_with_the_step_in_which_it_ends():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)

    assert gate.apply(TimeSlice(seq=3, slice_s=0.05), 10.0) is None
    assert step(gate, 10.0, 0.04) == []
    assert gate.is_open
    assert step(gate, 10.04, 0.03) == [
        TimeSliceOver(seq=3, used_s=pytest.approx(0.07), more=True, step_s=pytest.approx(0.035))
    ]
    assert not gate.is_open
    assert gate.work_done(11.0) == TimeSliceOver(
        seq=3, used_s=0.0, more=False, step_s=pytest.approx(0.035)
    )


def test_a_slice_of_short_steps_is_passed_on_before_the_last_which_is_told_the_next_time():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.apply(TimeSlice(seq=1, slice_s=0.01), 10.0)
    assert step(gate, 10.0, 0.004) == []

    assert step(gate, 10.004, 0.004) == []
    over = gate.before_step(10.008)
    assert isinstance(over, TimeSliceOver)
    assert (over.seq, over.used_s, over.more) == (1, pytest.approx(0.008), True)
    assert over.step_s == over.left_s == pytest.approx(0.004)
    assert not gate.is_open
    assert gate.after_step(10.013) is None
    gate.apply(TimeSlice(seq=2, slice_s=0.001), 11.0)
    again = gate.before_step(11.0)
    assert isinstance(again, TimeSliceOver)
    assert again.used_s == pytest.approx(0.005)


def test_who_reads_prompts_passes_on_after_a_step_however_short_the_last_were():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=True)
    gate.apply(TimeSlice(seq=1, slice_s=0.02), 10.0)
    assert [step(gate, 10.0 + n * 0.006, 0.006) for n in range(3)] == [[], [], []]

    assert gate.before_step(10.018) is None, "the next chunk may be a long one"
    over = gate.after_step(10.318)
    assert isinstance(over, TimeSliceOver)
    assert (over.used_s, over.left_s) == (pytest.approx(0.318), 0.0)
    assert over.step_s == pytest.approx(0.3)


def test_a_long_chunk_is_remembered_over_many_short_ones_and_forgotten_at_last():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=True)
    gate.apply(TimeSlice(seq=1, slice_s=9.0), 10.0)
    told = []
    for chunk_s in (0.3, *[0.006] * 200):
        step(gate, 10.0, chunk_s)
        gate.request_slice(prefills=False)
        told.append(gate.request_slice(prefills=True).step_s)

    assert told[0] == pytest.approx(0.3)
    assert told[20] > 2 * LONG_STEP_S
    assert told[-1] == pytest.approx(0.006, rel=0.2)


def test_a_long_chunk_in_company_counts_however_short_the_next_are():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=True)
    gate.apply(TimeSlice(seq=1, slice_s=0.01), 10.0)
    step(gate, 10.0, 0.006)
    step(gate, 10.006, 0.006)  # tells it
    gate.apply(TimeSlice(seq=2, slice_s=None), 10.1)

    assert step(gate, 10.1, 0.3) == [TimeSliceRequested(step_s=pytest.approx(0.3))]
    gate.apply(TimeSlice(seq=3, slice_s=0.012), 11.0)
    step(gate, 11.0, 0.006)
    (over,) = step(gate, 11.006, 0.006)
    assert over.step_s > 2 * LONG_STEP_S


def test_what_the_last_step_took_is_told_by_who_rests_and_forgotten_by_who_is_alone():
    gates = [TimeSliceGate(on=True), TimeSliceGate(on=True)]
    for gate in gates:
        gate.request_slice(prefills=False)
        gate.apply(TimeSlice(seq=1, slice_s=0.004), 10.0)
        assert step(gate, 10.0, 0.003) == []
        assert len(step(gate, 10.003, 0.5)) == 1

    assert gates[0].work_done(10.6).used_s == pytest.approx(0.5)
    gates[1].apply(TimeSlice(seq=2, slice_s=None), 10.6)
    assert gates[1].work_done(10.6).used_s == 0.0


@given(
    st.lists(
        st.tuples(
            st.floats(0.0001, 0.2),
            st.floats(0.0001, 0.08),
            st.lists(st.booleans(), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_was_used_is_told_to_the_last_bit_whenever_it_ends(turns):
    gate, now, used, told = TimeSliceGate(on=True), 5.0, 0.0, 0.0
    for seq, (slice_s, step_s, kinds) in enumerate(turns):
        said = [gate.request_slice(prefills=kinds[0])]
        said.append(gate.apply(TimeSlice(seq=seq, slice_s=slice_s), now))
        steps = 0
        while gate.is_open:
            said.append(gate.request_slice(prefills=kinds[steps % len(kinds)]))
            said += step(gate, now, step_s)
            now, used, steps = now + step_s, used + step_s, steps + 1
        told += sum(one.used_s for one in said if isinstance(one, TimeSliceOver))
        assert sum(isinstance(one, TimeSliceOver) for one in said) == 1
        assert steps
        assert (steps - 1) * step_s < slice_s + 1e-9, "begun after its end"
        now += 0.01
    told += gate.work_done(now).used_s

    assert told == pytest.approx(used)


def test_another_kind_of_work_is_told_with_what_its_steps_take():
    gate = TimeSliceGate(on=True)
    assert gate.request_slice(prefills=True) == TimeSliceRequested(step_s=None)
    assert gate.request_slice(prefills=False) == TimeSliceRequested(step_s=None)
    gate.apply(TimeSlice(seq=1, slice_s=1.0), 10.0)
    step(gate, 10.0, 0.004)
    assert gate.request_slice(prefills=True) == TimeSliceRequested(step_s=None)
    step(gate, 10.1, 0.3)

    assert gate.request_slice(prefills=False) == TimeSliceRequested(step_s=pytest.approx(0.004))
    assert gate.request_slice(prefills=True) == TimeSliceRequested(step_s=pytest.approx(0.3))


def test_the_first_step_of_a_turn_says_nothing_of_how_long_the_others_take():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    for turn in range(4):
        gate.apply(TimeSlice(seq=turn, slice_s=0.05), 10.0 + turn)
        step(gate, 10.0 + turn, 0.001)  # what it reads was made while others had their turn
        (over,) = step(gate, 10.001 + turn, 0.06)

    assert over.step_s == pytest.approx(0.06, rel=0.2)


def test_who_computes_beside_others_asks_for_turns_when_a_step_takes_long():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    assert not gate.is_timed
    gate.apply(TimeSlice(seq=1, slice_s=0.004), 10.0)
    step(gate, 10.0, 0.003)
    step(gate, 10.003, 0.003)  # tells it
    gate.apply(TimeSlice(seq=2, slice_s=None), 10.1)

    assert gate.is_timed
    assert step(gate, 10.1, LONG_STEP_S) == []
    assert step(gate, 10.2, 3 * LONG_STEP_S) == [TimeSliceRequested(step_s=None)]
    assert not gate.is_timed


def test_a_turn_that_is_read_late_is_good_for_one_step():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.apply(TimeSlice(seq=1, slice_s=0.05), 10.0)

    assert gate.is_open
    (over,) = step(gate, 10.0, 2.0)
    assert (over.seq, over.used_s, over.more) == (1, 2.0, True)
    assert not gate.is_open


def test_who_is_told_to_wait_waits_until_it_is_free():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.apply(TimeSlice(seq=1, slice_s=0.0), 10.0)

    assert not gate.is_open
    assert gate.apply(TimeSlice(seq=2, slice_s=None), 99.0) is None
    assert gate.is_open


def test_a_turn_that_comes_too_late_goes_back():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.work_done(1.0)

    assert gate.apply(TimeSlice(seq=2, slice_s=0.05), 2.0) == TimeSliceOver(
        seq=2, used_s=0.0, more=False
    )
    assert gate.request_slice(prefills=False) == TimeSliceRequested()
    assert not gate.is_open


def _rested(peer: Thread) -> bool:
    return any(not report.more for report in peer.of(TimeSliceOver))


@pytest.fixture
def peer():
    it = Thread(FakeEngine())
    yield it
    it.close()


def test_a_worker_that_waits_for_its_turn_hears_commands(peer):
    peer.load("fake:tps=0", time_slices="on")
    peer.send(TimeSlice(seq=1, slice_s=0.0), submit("a", max_tokens=8), submit("b", max_tokens=8))
    peer.wait_for(lambda: peer.of(TimeSliceRequested))
    peer.send(CancelRow(rid="a"))
    peer.wait_for(lambda: [one.phase for one in peer.of(PhaseChanged)][-1:] == ["idle"])
    assert not peer.of(RowTokens)

    peer.send(TimeSlice(seq=2, slice_s=5.0))
    a, b = peer.wait_for_end("a", "b")
    assert (a.reason, b.reason) == ("cancelled", "length")
    peer.wait_for(lambda: _rested(peer))


def test_a_worker_passes_its_turn_on_between_two_steps(peer):
    peer.load("fake:tps=0,pages=4000", time_slices="on")
    rids = [f"r{row}" for row in range(8)]
    peer.send(TimeSlice(seq=1, slice_s=0.0), *(submit(rid, max_tokens=10_000) for rid in rids))
    peer.wait_for(lambda: peer.of(TimeSliceRequested))
    for seq in (2, 3, 4):
        peer.send(TimeSlice(seq=seq, slice_s=0.003))
        over = peer.wait_for(lambda seq=seq: [r for r in peer.of(TimeSliceOver) if r.seq == seq])[0]
        assert over.more
        assert 0.003 <= over.used_s + over.left_s < 5.0
    assert 0 < len(peer.tokens("r0")) < 10_000
    peer.send(Stop(drain=False))
    peer.read_all()
    assert peer.join() == "done"


@pytest.mark.parametrize("drain", [True, False])
def test_a_worker_that_is_stopped_gives_its_turn_back(peer, drain):
    peer.load("fake:tps=0,pages=4000", time_slices="on")
    peer.send(TimeSlice(seq=1, slice_s=0.0), submit("a", max_tokens=3000 if drain else 10_000))
    peer.wait_for(lambda: peer.of(TimeSliceRequested))
    peer.send(TimeSlice(seq=2, slice_s=60.0))
    peer.wait_for(lambda: peer.of(RowTokens))
    peer.send(Stop(drain=drain))
    peer.read_all()

    assert peer.join() == "done"
    (over,) = peer.of(TimeSliceOver)
    assert (over.seq, over.more) == (2, False)


def test_nobody_hears_of_turns_where_they_are_off(peer):
    peer.load("fake:tps=0", time_slices="off")
    peer.send(submit("a", max_tokens=8))
    peer.wait_for_end("a")

    assert not peer.of(TimeSliceRequested)
