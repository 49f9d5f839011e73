"""The worker's loop: its reports, their order, and that it never waits for the daemon to read."""

from __future__ import annotations

import threading
import time

import pytest

from kvd.worker.fake.engine import FakeEngine
from kvd.worker.process.link import Link
from kvd.worker.process.loop import (
    COMMANDS_S,
    MOST_PAUSES_S,
    PAUSE_S,
    RATE_WINDOW_S,
    _Rate,
)
from kvd.worker.process.memory import Reading
from protocol.cache_outcome import RowCached
from protocol.types import Usage
from protocol.worker import (
    CancelRow,
    LoadFailed,
    LoadModel,
    MemoryRequested,
    PhaseChanged,
    Progress,
    Ready,
    Reclaim,
    Reclaimed,
    RowAccepted,
    RowAdmitted,
    RowFinished,
    RowPreempted,
    RowResumed,
    RowTokens,
    Started,
    StartLevel,
    Stats,
    Stop,
    TimeSlice,
    TimeSliceRequested,
    Tokenize,
    Tokenized,
)
from tests.worker.process.peer import DEADLINE_S, Thread, submit, wait_until


@pytest.fixture
def start():
    made = []

    def make(engine=None, **options):
        made.append(Thread(engine or FakeEngine(), **options))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def test_a_worker_from_start_to_stop(start):
    peer = start()
    info = peer.load()
    assert info.architecture == "Fake"
    peer.send(submit("a", max_tokens=3))
    peer.wait_for_end("a")
    peer.wait_for(lambda: [one.phase for one in peer.of(PhaseChanged)][-1:] == ["idle"])
    peer.send(Stop())
    peer.read_all()
    assert peer.join() == "done"
    phases = [report.phase for report in peer.of(PhaseChanged)]
    assert phases == ["tokenize", "decode", "prefill", "decode", "idle"]
    periodic = (PhaseChanged, Progress, Stats)
    kinds = [type(report) for report in peer.reports if not isinstance(report, periodic)]
    assert kinds[:5] == [Started, MemoryRequested, Ready, RowAccepted, RowAdmitted]
    assert kinds[-1] is RowFinished
    assert set(kinds[5:-1]) == {RowCached, RowTokens}
    assert peer.of(RowAccepted) == [RowAccepted(rid="a", prompt_tokens=5)]
    assert peer.of(RowFinished) == [
        RowFinished(rid="a", reason="length", usage=Usage(5, 3, levels=[0]))
    ]
    assert len(peer.tokens("a")) == 3


def test_unread_reports_do_not_delay_steps_and_none_is_lost(start):
    peer = start(sock_buffer=4096)
    peer.load("fake:tps=0,pages=1000")
    for row in range(8):
        peer.send(submit(f"r{row}", prompt=f"prompt {row}", max_tokens=3000))
    # No reports are read: 24 000 tokens are generated, and the socket takes a few hundred.
    wait_until(lambda: peer.engine._generated_tokens == 24_000)
    peer.wait_for_end(*[f"r{row}" for row in range(8)])
    reference = start()
    reference.load("fake:tps=0,pages=1000")
    for row in range(8):
        rid = f"r{row}"
        assert len(peer.tokens(rid)) == 3000
        reference.send(submit(rid, prompt=f"prompt {row}", max_tokens=3000))
        reference.wait_for_end(rid)
        assert peer.tokens(rid) == reference.tokens(rid)
        assert peer.text(rid) == reference.text(rid)
    assert len(peer.of(RowTokens)) < 3000  # tokens that wait to be sent are merged


def test_a_cancelled_row_ends_within_a_step(start):
    peer = start()
    peer.load("fake:tps=500")
    peer.send(submit("a", max_tokens=10_000), submit("b", max_tokens=60))
    peer.wait_for(lambda: peer.of(RowTokens, "a"))
    peer.send(CancelRow(rid="a"), CancelRow(rid="unknown"))
    a, b = peer.wait_for_end("a", "b")
    assert (a.reason, b.reason) == ("cancelled", "length")
    assert a.usage.completion_tokens == len(peer.tokens("a"))
    assert len(peer.tokens("b")) == 60
    assert len(peer.ends()) == 2


def test_a_refused_request_does_not_affect_others(start):
    peer = start()
    peer.load()
    peer.send(submit("empty", prompt=""), submit("long", prompt="x" * 20_000), submit("fine"))
    empty, too_long, _ = peer.wait_for_end("empty", "long", "fine")
    assert empty.error.code == "empty_prompt"
    assert too_long.error.code == "context_too_long"
    assert not peer.of(RowAccepted, "empty")


def test_a_tokenizer_error_fails_only_its_request(start):
    class FailingEngine(FakeEngine):
        def submit(self, request):
            if request.rid == "bad":
                raise ZeroDivisionError
            return super().submit(request)

    peer = start(FailingEngine())
    peer.load()
    peer.send(submit("bad"), submit("good", max_tokens=2))
    bad, good = peer.wait_for_end("bad", "good")
    assert bad.error.code == "internal"
    assert good.reason == "length"


def test_a_failed_load_is_reported_and_ends_the_worker(start):
    peer = start()
    peer.send(LoadModel(source="fake:load_error=invalid_model"))
    peer.read_all()
    assert peer.of(LoadFailed)[0].error.code == "invalid_model"
    assert peer.join() == "done"


def test_a_load_without_memory_reports_the_needed_bytes(start):
    peer = start()
    peer.budget = 1000
    peer.send(LoadModel(source="fake:weights=5000,pages=0"))
    peer.read_all()
    error = peer.of(LoadFailed)[0].error
    assert error.code == "insufficient_memory"
    sizes = {"available_bytes": 1000, "limit_bytes": 1000, "budget_bytes": 1000}
    assert error.detail == {"needed_bytes": 5000} | sizes
    assert peer.join() == "done"


@pytest.mark.parametrize("write_s", [0.0, 1.5])
def test_a_stop_ends_a_load(start, write_s):
    peer = start()
    peer.send(LoadModel(source="fake:load=5"))
    peer.wait_for(lambda: peer.of(Progress))
    peer.send(Stop(write_s=write_s))
    peer.read_all()
    assert peer.join() == "done"
    assert not peer.of(Ready)


def test_a_stop_before_the_load(start):
    peer = start()
    peer.send(Stop())
    assert peer.join() == "done"


def test_a_stop_does_not_wait_for_rows(start):
    peer = start()
    peer.load("fake:tps=50")
    peer.send(submit("a", max_tokens=10_000))
    peer.wait_for(lambda: peer.of(RowTokens))
    peer.send(Stop())
    peer.read_all()
    assert peer.join() == "done"


def test_the_end_of_the_stream_ends_the_loop(start):
    peer = start()
    peer.load()
    peer.sock.close()
    assert peer.join() == "orphaned"


def test_rows_run_when_memory_is_granted(start):
    peer = start()
    peer.load("fake:tps=0,pages=2")
    peer.send(submit("a", prompt="x" * 1000, max_tokens=100))
    peer.wait_for_end("a")
    requests = peer.of(MemoryRequested)
    assert [one.seq for one in requests] == list(range(1, len(requests) + 1))
    assert len(requests) >= 2


def test_a_request_beyond_the_budget_fails_alone(start):
    peer = start()
    peer.load("fake:tps=0,pages=2,weights=0")
    peer.budget = peer.granted
    peer.send(submit("big", prompt="x" * 1000, max_tokens=100), submit("small", max_tokens=100))
    big, small = peer.wait_for_end("big", "small")
    assert big.error.code == "insufficient_memory"
    assert small.reason == "length"


def test_a_worker_that_awaits_a_grant_sleeps(start):
    peer = start()
    peer.load("fake:tps=0,pages=2")
    peer._take = peer.reports.append  # the daemon does not answer
    peer.send(submit("a", prompt="x" * 1000, max_tokens=100))
    peer.wait_for(lambda: len(peer.of(MemoryRequested)) == 2)
    steps = peer.engine._steps
    peer.send(CancelRow(rid="unknown"))  # wakes the loop, which has no work
    peer.send(submit("b", prompt="x", max_tokens=1))
    peer.wait_for(lambda: peer.of(RowAccepted, "b"))
    assert peer.engine._steps == steps
    assert not peer.engine.has_work


def test_counters_are_reported_at_most_four_times_a_second(start):
    engine = FakeEngine()
    reading = Reading(lambda: 12345, time.monotonic)
    peer = start(engine, clock=lambda: engine._steps * 0.01, footprint=reading)
    peer.load()
    peer.send(submit("a", max_tokens=2000))
    peer.wait_for_end("a")
    seen = [report.stats for report in peer.of(Stats)]
    assert 2 <= len(seen) <= 2000 * 0.01 / 0.25 + 2
    assert seen[-1].memory.footprint == 12345
    assert seen[-1].tokens_per_s == pytest.approx(100.0)
    assert seen == sorted(seen, key=lambda stats: stats.step)


def test_an_idle_worker_reports_its_last_counters_soon(start):
    peer = start()
    peer.load()
    peer.send(submit("a", max_tokens=5))
    peer.wait_for_end("a")
    peer.wait_for(lambda: peer.of(Stats) and peer.of(Stats)[-1].stats.generated_tokens == 5)
    assert peer.of(Stats)[-1].stats.rows_running == 0


class IdleEngine(FakeEngine):
    """Has idle work after each request, and notes when it is done."""

    def __init__(self, clock):
        super().__init__(clock=clock)
        self.idle_steps = []
        self.is_left = False
        self.leaves_work = True

    @property
    def has_work(self):
        return super().has_work or self.is_left

    def step(self):
        if self.is_idle:
            self.idle_steps.append(self.clock())
        self.is_left = not self.is_idle and self.leaves_work
        return super().step()


@pytest.fixture
def paused(start):
    """Return a worker with an idle engine, the engine, and the time of its clock."""
    now = [100.0]
    engine = IdleEngine(lambda: now[0])
    peer = start(engine, clock=lambda: now[0])
    peer.load()
    return peer, engine, now


def answer(peer, rid):
    peer.send(submit(rid, max_tokens=3))
    peer.wait_for_end(rid)


def test_idle_work_waits_for_a_pause_without_requests(paused):
    """A request during the pause is served first, and a new pause begins after it."""
    peer, engine, now = paused
    answer(peer, "a")
    now[0] += 0.9 * PAUSE_S
    answer(peer, "b")
    now[0] += 0.9 * PAUSE_S
    peer.send(Tokenize(seq=1, prompt="x"))
    peer.wait_for(lambda: peer.of(Tokenized))
    assert engine.has_work
    assert engine.is_idle
    assert not engine.idle_steps
    now[0] += 0.2 * PAUSE_S
    wait_until(lambda: engine.idle_steps)
    assert engine.idle_steps == [now[0]]
    wait_until(lambda: not engine.has_work)


def test_idle_work_does_not_wait_for_ever(paused):
    peer, engine, now = paused
    begin = now[0]
    for number in range(200):
        answer(peer, f"r{number}")
        if engine.idle_steps:
            break
        now[0] += 0.9 * PAUSE_S
    assert MOST_PAUSES_S <= engine.idle_steps[0] - begin <= MOST_PAUSES_S + 4 * PAUSE_S


def test_a_pause_does_not_begin_at_work_that_is_no_longer_left(paused):
    peer, engine, now = paused
    answer(peer, "a")
    engine.leaves_work = False
    now[0] += 0.5 * PAUSE_S
    answer(peer, "b")
    wait_until(lambda: not engine.has_work)
    engine.leaves_work = True
    now[0] += 3600.0
    answer(peer, "c")
    peer.send(Tokenize(seq=1, prompt="x"))
    peer.wait_for(lambda: peer.of(Tokenized))
    assert engine.has_work
    assert not engine.idle_steps


def test_counters_are_reported_when_idle_work_begins_to_wait(paused):
    """The governor may reclaim what is not returned yet."""
    peer, engine, _ = paused
    for rid in "abc":
        answer(peer, rid)
        tokens = engine.stats().generated_tokens
        peer.wait_for(lambda: peer.of(Stats)[-1].stats.generated_tokens == tokens)  # noqa: B023
    assert not engine.idle_steps


def test_a_rate_falls_to_zero_in_its_window():
    rate = _Rate()
    assert rate.at(0.0, 0) == 0.0
    assert rate.at(1.0, 100) == 100.0
    assert rate.at(2.0, 300) == 150.0
    assert rate.at(4.0, 300) == 0.0
    assert rate.at(4.0 + RATE_WINDOW_S, 300) == 0.0


def test_reclaim_commands_reach_the_engine_and_are_answered(start):
    peer = start()
    peer.load("fake:tps=500,pages=8")
    peer.send(StartLevel(level=1), submit("a", "x" * 2000, max_tokens=4000))
    peer.wait_for(lambda: any(one.stats.reclaimable.rows == 1 for one in peer.of(Stats)))
    peer.send(Reclaim(seq=5, method="preempt", wanted_bytes=1))
    peer.wait_for(lambda: bool(peer.of(RowResumed)))
    assert [(one.seq, one.freed_bytes > 0) for one in peer.of(Reclaimed)] == [(5, True)]
    assert [one.rid for one in peer.of(RowPreempted)] == ["a"]
    assert peer.of(Stats)[-1].stats.reclaimable.level == 1
    requests = peer.of(MemoryRequested)
    assert any(one.resuming for one in requests) or len(requests) > 1
    peer.send(CancelRow(rid="a"))
    peer.wait_for_end("a")


def test_reports_are_sent_before_the_step_ends_if_the_engine_passes_them_early(start):
    class EarlyEngine(FakeEngine):
        ended = threading.Event()

        def watch(self, on_phase, on_reports=None):
            super().watch(on_phase)
            self.on_reports = on_reports

        def step(self):
            reports = super().step()
            self.on_reports(reports)
            if any(isinstance(report, RowTokens) for report in reports):
                assert self.ended.wait(DEADLINE_S)
            return []

    peer = start(EarlyEngine())
    peer.load()
    peer.send(submit("a", max_tokens=2))
    peer.wait_for(lambda: peer.of(RowTokens, "a"))
    EarlyEngine.ended.set()
    peer.wait_for_end("a")
    assert len(peer.tokens("a")) == 2


class Busy(FakeEngine):
    """Spends more than half of the time for commands on each request, and records what it does."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0
        self.done = []
        self.all_sent = threading.Event()

    def submit(self, request):
        self.all_sent.wait(DEADLINE_S)
        self.seconds += 0.6 * COMMANDS_S
        self.done.append(request.rid)
        return super().submit(request)

    def step(self):
        self.done.append("step")
        return super().step()


def test_many_requests_at_once_do_not_delay_the_rows(start):
    engine = Busy()
    peer = start(engine, clock=lambda: engine.seconds)
    peer.load()
    names = [f"r{number}" for number in range(20)]
    peer.send(*[submit(name, max_tokens=40) for name in names])
    engine.all_sent.set()
    peer.wait_for_end(*names)

    between = " ".join(engine.done).split("step")
    assert max(len(one.split()) for one in between) == 2
    assert [one for one in engine.done if one != "step"] == names


def test_commands_that_are_left_wait_for_no_time_slice(start, monkeypatch):
    """The slice itself may be behind them."""
    engine = Busy()
    peer = start(engine, clock=lambda: engine.seconds)
    peer.load(time_slices="on")
    engine.all_sent.set()
    peer.send(TimeSlice(seq=1, slice_s=0.0), submit("first", max_tokens=40))
    peer.wait_for(lambda: peer.of(TimeSliceRequested))
    engine.all_sent.clear()
    wait, left = Link.wait, []

    def note(link, timeout_s):
        left.append(len(link.commands))
        wait(link, timeout_s)

    names = [f"r{number}" for number in range(20)]
    peer.send(*[submit(name, max_tokens=40) for name in names])
    peer.send(TimeSlice(seq=2, slice_s=None))
    monkeypatch.setattr(Link, "wait", note)
    engine.all_sent.set()
    peer.wait_for_end("first", *names)

    assert not any(left)
