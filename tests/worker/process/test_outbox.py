"""The outbox: no report of a request is lost or reordered, for any sequence of put and take."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.worker.process.outbox import Outbox, _key_of
from protocol.errors import LocalProtocolError, WorkerDied
from protocol.framing import FrameDecoder, decode_report
from protocol.parts import PartStart
from protocol.types import TokenLogprob, Usage, WorkerStats
from protocol.worker import (
    ChoiceFinished,
    MemoryRequested,
    PhaseChanged,
    Progress,
    RowAccepted,
    RowFailed,
    RowFinished,
    RowPreempted,
    RowPrompt,
    RowQueued,
    RowResumed,
    RowTokens,
    Started,
    Stats,
)

ALL = 10**9


@pytest.fixture
def outbox():
    made = Outbox()
    yield made
    check(made)


def check(outbox):
    """Assert the invariants."""
    assert list(outbox._waiting) == sorted(outbox._waiting)
    keyed = [
        (key, number)
        for number, report in outbox._waiting.items()
        if (key := _key_of(report)) is not None
    ]
    assert dict(keyed) == outbox._last
    assert len(keyed) == len(outbox._last), "two reports should have been merged"


def taken(outbox, at_least=ALL):
    return [decode_report(frame) for frame in FrameDecoder().receive(outbox.take(at_least))]


def tokens(rid, index, *numbers):
    return RowTokens(rid=rid, index=index, tokens=list(numbers), text="".join(map(chr, numbers)))


def marked(rid, index, *numbers):
    """Return tokens, of which those divisible by 3 begin a part."""
    parts = [PartStart(at, "call") for at, number in enumerate(numbers, index) if number % 3 == 0]
    return msgspec.structs.replace(tokens(rid, index, *numbers), parts=parts)


def finished(rid):
    return RowFinished(rid=rid, reason="stop", usage=Usage(1, 2))


def stats(step):
    return Stats(stats=WorkerStats(step=step))


def test_tokens_of_a_request_are_merged_across_other_reports(outbox):
    for report in (tokens("a", 0, 65), tokens("b", 0, 97), tokens("a", 1, 66, 67), stats(1)):
        outbox.put(report)
    assert taken(outbox) == [tokens("a", 0, 65, 66, 67), tokens("b", 0, 97), stats(1)]
    assert len(outbox) == 0


def test_tokens_of_different_levels_are_not_merged(outbox):
    def at(level, index, number):
        return msgspec.structs.replace(tokens("a", index, number), level=level)

    for report in (at(0, 0, 65), at(0, 1, 66), at(2, 2, 67), at(2, 3, 68)):
        outbox.put(report)
    found = taken(outbox)
    assert [(one.level, one.index, one.tokens) for one in found] == [
        (0, 0, [65, 66]),
        (2, 2, [67, 68]),
    ]


def test_each_choice_is_merged_separately_and_its_end_follows(outbox):
    def of(choice, index, number):
        made = tokens("a", index, number)
        logprobs = [TokenLogprob(number, chr(number), -1.0)]
        return msgspec.structs.replace(made, choice=choice, logprobs=logprobs)

    reports = [of(0, 0, 65), of(1, 0, 97), of(0, 1, 66), of(1, 1, 98)]
    first = msgspec.structs.replace(reports[0], logprobs=list(reports[0].logprobs))
    for report in [*reports, ChoiceFinished(rid="a", choice=1, reason="stop"), of(0, 2, 67)]:
        outbox.put(report)
    outbox.put(finished("a"))
    assert reports[0] == first, "a report is not changed by put"
    zero, one, choice, end = taken(outbox)
    assert (zero.choice, zero.tokens, zero.text) == (0, [65, 66, 67], "ABC")
    assert [logprob.token for logprob in zero.logprobs] == zero.tokens
    assert (one.choice, one.tokens, len(one.logprobs)) == (1, [97, 98], 2)
    assert (choice.choice, end) == (1, finished("a"))


def test_prompt_logprobs_stay_between_acceptance_and_tokens(outbox):
    reports = [
        RowAccepted(rid="a", prompt_tokens=3),
        RowPrompt(rid="a", index=0, logprobs=[TokenLogprob(1, "x")]),
        RowPrompt(rid="a", index=1, logprobs=[TokenLogprob(2, "y", -1.0)]),
        tokens("a", 0, 65),
    ]
    for report in reports:
        outbox.put(report)
    assert taken(outbox) == reports


def preempted(rid, nbytes=1):
    return RowPreempted(rid=rid, nbytes=nbytes, where="disk")


def test_a_newer_queue_position_replaces_an_older_one(outbox):
    for rid, position in [("a", 7), ("b", 8), ("a", 6), ("b", 7)]:
        outbox.put(RowQueued(rid=rid, position=position))
    assert taken(outbox) == [RowQueued(rid="a", position=6), RowQueued(rid="b", position=7)]


def test_preemptions_and_resumptions_keep_the_last_of_each_and_alternate(outbox):
    resumed = RowResumed(rid="a")
    for report in (preempted("a"), resumed, preempted("b"), preempted("a", 2)):
        outbox.put(report)
    assert taken(outbox) == [preempted("a", 2), preempted("b")]
    for report in (resumed, preempted("a", 3), resumed):
        outbox.put(report)
    assert taken(outbox) == [resumed]
    for report in (preempted("a", 4), tokens("a", 0, 65), resumed):
        outbox.put(report)
    assert taken(outbox) == [preempted("a", 4), tokens("a", 0, 65), resumed]


def test_put_reports_are_not_changed(outbox):
    first = tokens("a", 0, 65)
    outbox.put(first)
    outbox.put(marked("a", 1, 66))
    assert first == tokens("a", 0, 65)


def test_tokens_after_a_take_start_a_new_report(outbox):
    outbox.put(tokens("a", 0, 65))
    assert taken(outbox) == [tokens("a", 0, 65)]
    outbox.put(tokens("a", 1, 66))
    assert taken(outbox) == [tokens("a", 1, 66)]


def test_the_order_of_one_request_is_kept(outbox):
    reports = [RowAccepted(rid="a", prompt_tokens=3), tokens("a", 0, 65), finished("a")]
    for report in reports:
        outbox.put(report)
    assert taken(outbox) == reports


def test_newer_counters_progress_and_phases_replace_older_ones_in_place(outbox):
    outbox.put(stats(1))
    outbox.put(Progress(stage="weights", fraction=0.1))
    outbox.put(PhaseChanged(phase="prefill"))
    outbox.put(tokens("a", 0, 65))
    outbox.put(Progress(stage="weights", fraction=0.9))
    outbox.put(PhaseChanged(phase="decode"))
    outbox.put(stats(2))
    assert taken(outbox) == [
        stats(2),
        Progress(stage="weights", fraction=0.9),
        PhaseChanged(phase="decode"),
        tokens("a", 0, 65),
    ]


def test_other_reports_are_all_kept(outbox):
    reports = [
        Started(pid=1),
        MemoryRequested(seq=1, total_bytes=5, reason="x"),
        MemoryRequested(seq=2, total_bytes=9, reason="y"),
        RowFailed(rid="b", error=WorkerDied("gone").info()),
    ]
    for report in reports:
        outbox.put(report)
    assert taken(outbox) == reports


def test_a_take_ends_after_the_frame_that_reaches_its_size(outbox):
    for rid in "abc":
        outbox.put(finished(rid))
    one = len(outbox.take(1))
    assert len(outbox) == 2
    assert len(outbox.take(one + 1)) == 2 * one
    assert outbox.take(ALL) == b""


def test_a_gap_in_a_request_s_tokens_is_a_bug(outbox):
    outbox.put(tokens("a", 0, 65))
    with pytest.raises(LocalProtocolError, match="row a: tokens from 2 follow those from 0 to 1"):
        outbox.put(tokens("a", 2, 67))


def test_the_size_is_bounded_by_the_requests(outbox):
    for step in range(1000):
        for rid in "abcd":
            outbox.put(tokens(rid, step, 65))
        outbox.put(stats(step))
    assert len(outbox) == 5


class Traffic(RuleBasedStateMachine):
    """Requests put reports while a reader takes some: none is lost or reordered."""

    def __init__(self):
        super().__init__()
        self.outbox = Outbox()
        self.put_reports = {}
        self.taken_reports = {}
        self.stats = (0, 0)
        self.open = []
        self.grants = ([], [])

    @rule()
    def accept(self):
        rid = f"r{len(self.put_reports)}"
        self.put_reports[rid] = ["accepted"]
        self.open.append(rid)
        self.outbox.put(RowAccepted(rid=rid, prompt_tokens=1))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), numbers=st.lists(st.integers(65, 90), max_size=3))
    def tokens(self, data, numbers):
        rid = data.draw(st.sampled_from(self.open))
        index = sum(isinstance(one, int) for one in self.put_reports[rid])
        self.put_reports[rid] += numbers
        self.outbox.put(marked(rid, index, *numbers))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        rid = data.draw(st.sampled_from(self.open))
        self.open.remove(rid)
        self.put_reports[rid].append("finished")
        self.outbox.put(finished(rid))

    @rule()
    def count_step(self):
        self.stats = (self.stats[0] + 1, self.stats[1])
        self.outbox.put(stats(self.stats[0]))

    @rule()
    def request_memory(self):
        self.grants[0].append(len(self.grants[0]))
        self.outbox.put(MemoryRequested(seq=self.grants[0][-1], total_bytes=1, reason=""))

    @rule(at_least=st.integers(1, 200))
    def take(self, at_least):
        for report in taken(self.outbox, at_least):
            match report:
                case Stats():
                    assert report.stats.step > self.stats[1]
                    self.stats = (self.stats[0], report.stats.step)
                case MemoryRequested():
                    self.grants[1].append(report.seq)
                case RowAccepted():
                    self.taken_reports[report.rid] = ["accepted"]
                case RowTokens():
                    reports = self.taken_reports[report.rid]
                    assert report.index == sum(isinstance(one, int) for one in reports)
                    assert report == marked(report.rid, report.index, *report.tokens)
                    reports += report.tokens
                case RowFinished():
                    self.taken_reports[report.rid].append("finished")

    @invariant()
    def holds(self):
        check(self.outbox)
        assert len(self.outbox) <= 3 * len(self.put_reports) + 1 + len(self.grants[0])

    def teardown(self):
        self.take(ALL)
        assert self.taken_reports == self.put_reports
        assert self.stats[0] == self.stats[1]
        assert self.grants[0] == self.grants[1]


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
