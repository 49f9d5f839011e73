"""The worker's side of time slices: when it may start a step, and what it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.fake.engine import FakeEngine
from kvd.worker.process.time_slice_gate import TimeSliceGate, uses_time_slices
from protocol.time_slices import LONG_STEP_S
from protocol.worker import (
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
def test_time_slices_are_used_on_accelerators_by_default(mode, device, on):
    assert uses_time_slices(mode, device) is on


def test_without_time_slices_the_gate_is_open_and_silent():
    gate = TimeSliceGate(on=False)

    assert gate.request_slice(prefills=False) is None
    assert gate.is_open
    assert gate.work_done(1e9) is None


def test_work_is_reported_once():
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
    return [
        report for report in (gate.before_step(start), gate.after_step(start + seconds)) if report
    ]


def test_a_slice_of_long_steps_ends_after_the_step_in_which_it_expires():
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


def test_a_slice_of_short_steps_ends_before_its_last_step_whose_time_is_reported_later():
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


def test_a_slice_with_prefill_ends_after_a_step():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=True)
    gate.apply(TimeSlice(seq=1, slice_s=0.02), 10.0)
    assert [step(gate, 10.0 + n * 0.006, 0.006) for n in range(3)] == [[], [], []]

    assert gate.before_step(10.018) is None, "the next chunk may be a long one"
    over = gate.after_step(10.318)
    assert isinstance(over, TimeSliceOver)
    assert (over.used_s, over.left_s) == (pytest.approx(0.318), 0.0)
    assert over.step_s == pytest.approx(0.3)


def test_a_long_chunk_is_forgotten_slowly():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=True)
    gate.apply(TimeSlice(seq=1, slice_s=9.0), 10.0)
    reported = []
    for chunk_s in (0.3, *[0.006] * 200):
        step(gate, 10.0, chunk_s)
        gate.request_slice(prefills=False)
        reported.append(gate.request_slice(prefills=True).step_s)

    assert reported[0] == pytest.approx(0.3)
    assert reported[20] > 2 * LONG_STEP_S
    assert reported[-1] == pytest.approx(0.006, rel=0.2)


def test_a_long_chunk_without_slices_counts_in_later_slices():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=True)
    gate.apply(TimeSlice(seq=1, slice_s=0.01), 10.0)
    step(gate, 10.0, 0.006)
    step(gate, 10.006, 0.006)  # reports the step time
    gate.apply(TimeSlice(seq=2, slice_s=None), 10.1)

    assert step(gate, 10.1, 0.3) == [TimeSliceRequested(step_s=pytest.approx(0.3))]
    gate.apply(TimeSlice(seq=3, slice_s=0.012), 11.0)
    step(gate, 11.0, 0.006)
    (over,) = step(gate, 11.006, 0.006)
    assert over.step_s > 2 * LONG_STEP_S


def test_the_time_of_the_last_step_is_reported_or_dropped_without_slices():
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
def test_all_used_time_is_reported(slices):
    gate, now, used, reported = TimeSliceGate(on=True), 5.0, 0.0, 0.0
    for seq, (slice_s, step_s, kinds) in enumerate(slices):
        reports = [gate.request_slice(prefills=kinds[0])]
        reports.append(gate.apply(TimeSlice(seq=seq, slice_s=slice_s), now))
        steps = 0
        while gate.is_open:
            reports.append(gate.request_slice(prefills=kinds[steps % len(kinds)]))
            reports += step(gate, now, step_s)
            now, used, steps = now + step_s, used + step_s, steps + 1
        reported += sum(one.used_s for one in reports if isinstance(one, TimeSliceOver))
        assert sum(isinstance(one, TimeSliceOver) for one in reports) == 1
        assert steps
        assert (steps - 1) * step_s < slice_s + 1e-9, "a step began after the slice had expired"
        now += 0.01
    reported += gate.work_done(now).used_s

    assert reported == pytest.approx(used)


def test_another_kind_of_work_is_reported_with_its_step_time():
    gate = TimeSliceGate(on=True)
    assert gate.request_slice(prefills=True) == TimeSliceRequested(step_s=None)
    assert gate.request_slice(prefills=False) == TimeSliceRequested(step_s=None)
    gate.apply(TimeSlice(seq=1, slice_s=1.0), 10.0)
    step(gate, 10.0, 0.004)
    assert gate.request_slice(prefills=True) == TimeSliceRequested(step_s=None)
    step(gate, 10.1, 0.3)

    assert gate.request_slice(prefills=False) == TimeSliceRequested(step_s=pytest.approx(0.004))
    assert gate.request_slice(prefills=True) == TimeSliceRequested(step_s=pytest.approx(0.3))


def test_a_short_first_step_of_a_slice_does_not_lower_the_step_time():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    for seq in range(4):
        gate.apply(TimeSlice(seq=seq, slice_s=0.05), 10.0 + seq)
        step(gate, 10.0 + seq, 0.001)  # the GPU computed it before this slice
        (over,) = step(gate, 10.001 + seq, 0.06)

    assert over.step_s == pytest.approx(0.06, rel=0.2)


def test_long_steps_without_slices_request_slices():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    assert not gate.is_timed
    gate.apply(TimeSlice(seq=1, slice_s=0.004), 10.0)
    step(gate, 10.0, 0.003)
    step(gate, 10.003, 0.003)  # reports the step time
    gate.apply(TimeSlice(seq=2, slice_s=None), 10.1)

    assert gate.is_timed
    assert step(gate, 10.1, LONG_STEP_S) == []
    assert step(gate, 10.2, 3 * LONG_STEP_S) == [TimeSliceRequested(step_s=None)]
    assert not gate.is_timed


def test_a_slice_that_is_read_late_allows_one_step():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.apply(TimeSlice(seq=1, slice_s=0.05), 10.0)

    assert gate.is_open
    (over,) = step(gate, 10.0, 2.0)
    assert (over.seq, over.used_s, over.more) == (1, 2.0, True)
    assert not gate.is_open


def test_a_closed_gate_opens_without_slices():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.apply(TimeSlice(seq=1, slice_s=0.0), 10.0)

    assert not gate.is_open
    assert gate.apply(TimeSlice(seq=2, slice_s=None), 99.0) is None
    assert gate.is_open


def test_a_slice_for_finished_work_is_ended_at_once():
    gate = TimeSliceGate(on=True)
    gate.request_slice(prefills=False)
    gate.work_done(1.0)

    assert gate.apply(TimeSlice(seq=2, slice_s=0.05), 2.0) == TimeSliceOver(
        seq=2, used_s=0.0, more=False
    )
    assert gate.request_slice(prefills=False) == TimeSliceRequested()
    assert not gate.is_open


def _reported_no_work(peer: Thread) -> bool:
    return any(not report.more for report in peer.of(TimeSliceOver))


@pytest.fixture
def peer():
    thread = Thread(FakeEngine())
    yield thread
    thread.close()


def test_a_worker_that_waits_for_a_slice_handles_commands(peer):
    peer.load("fake:tps=0", time_slices="on")
    peer.send(TimeSlice(seq=1, slice_s=0.0), submit("a", max_tokens=8), submit("b", max_tokens=8))
    peer.wait_for(lambda: peer.of(TimeSliceRequested))
    peer.send(CancelRow(rid="a"))
    (a,) = peer.wait_for_end("a")
    assert a.reason == "cancelled"
    peer.wait_for(lambda: [one.phase for one in peer.of(PhaseChanged)][-1:] == ["idle"])
    assert not peer.of(RowTokens)

    peer.send(TimeSlice(seq=2, slice_s=5.0))
    (b,) = peer.wait_for_end("b")
    assert b.reason == "length"
    peer.wait_for(lambda: _reported_no_work(peer))


def test_a_worker_ends_its_slice_between_steps(peer):
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
    peer.send(Stop())
    peer.read_all()
    assert peer.join() == "done"


def test_a_stopped_worker_ends_its_slice(peer):
    peer.load("fake:tps=0,pages=4000", time_slices="on")
    peer.send(TimeSlice(seq=1, slice_s=0.0), submit("a", max_tokens=10_000))
    peer.wait_for(lambda: peer.of(TimeSliceRequested))
    peer.send(TimeSlice(seq=2, slice_s=60.0))
    peer.wait_for(lambda: peer.of(RowTokens))
    peer.send(Stop())
    peer.read_all()

    assert peer.join() == "done"
    (over,) = peer.of(TimeSliceOver)
    assert (over.seq, over.more) == (2, False)


def test_without_time_slices_none_is_requested(peer):
    peer.load("fake:tps=0", time_slices="off")
    peer.send(submit("a", max_tokens=8))
    peer.wait_for_end("a")

    assert not peer.of(TimeSliceRequested)
