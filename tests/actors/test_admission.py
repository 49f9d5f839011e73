"""Admission: each request ends once and goes only to ready workers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.machines.admission import Admission
from actors.machines.admission_events import (
    AlarmFired,
    CancelInWorker,
    ConfirmCancel,
    Drained,
    DrainStarted,
    EnsureLoaded,
    Event,
    FailRequest,
    Forward,
    ModelChanged,
    ModelEvicting,
    ModelHeld,
    ModelRemoved,
    QueuedInWorker,
    ReportBlame,
    ReportPaused,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestProgressed,
    RequestReturned,
    RequestsLost,
)
from protocol.errors import ErrorInfo

DIED = ErrorInfo("worker_died", "died", True)
FAILED = ErrorInfo("model_failed", "gave up")
MEMORY = ErrorInfo("insufficient_memory", "no room")


@pytest.fixture
def admission():
    """An `Admission` whose invariants are checked at the end."""
    subject = Admission(max_requests=3)
    yield subject
    subject.check()


def feed(admission: Admission, *events: Event):
    commands = [command for event in events for command in admission.handle(event, 0.0)]
    admission.check()
    return commands


def codes(commands) -> list[str]:
    return [f"{c.rid} {c.error.code}" for c in commands if isinstance(c, FailRequest)]


def test_a_request_for_a_ready_model_is_forwarded(admission):
    commands = feed(admission, ModelChanged("m", "ready"), RequestArrived("1", "m"))

    assert [Forward("1", "m")] == commands
    assert feed(admission, RequestFinished("1")) == []
    assert admission.requests == {}


def test_requests_wait_for_their_model_in_order(admission):
    feed(
        admission, ModelChanged("m", "waiting"), RequestArrived("2", "m"), RequestArrived("1", "m")
    )

    assert [Forward("2", "m"), Forward("1", "m")] == feed(admission, ModelChanged("m", "ready"))


@pytest.mark.parametrize(
    ("availability", "code"), [("closing", "draining"), ("failed", "model_failed")]
)
def test_requests_for_a_closing_or_failed_model_are_refused(admission, availability, code):
    feed(admission, ModelChanged("m", availability, FAILED if availability == "failed" else None))

    assert [f"1 {code}"] == codes(feed(admission, RequestArrived("1", "m")))


def test_the_load_of_an_unknown_model_is_requested_once(admission):
    assert feed(admission, RequestArrived("1", "m"), RequestArrived("2", "m")) == [
        EnsureLoaded("m")
    ]
    assert feed(admission, ModelChanged("m", "waiting")) == []
    assert feed(admission, ModelChanged("m", "ready")) == [Forward("1", "m"), Forward("2", "m")]


def test_waiting_requests_for_an_unknown_model_fail(admission):
    feed(admission, RequestArrived("1", "m", deadline=5.0), RequestArrived("2", "m"))
    assert codes(admission.handle(AlarmFired(), 5.0)) == ["1 deadline_exceeded"]
    error = ErrorInfo("unknown_model", "no model 'm' is loaded")

    assert feed(admission, ModelRemoved("m", error)) == [FailRequest("2", error)]
    assert feed(admission, RequestArrived("3", "m")) == [
        EnsureLoaded("m")
    ]  # the model may be known by now
    assert feed(admission, RequestCancelled("3")) == [ConfirmCancel("3")]


def test_requests_above_the_limit_are_overloaded(admission):
    feed(admission, ModelChanged("m", "waiting"), ModelChanged("n", "ready"))
    feed(admission, *(RequestArrived(str(n), "m") for n in range(3)))

    assert codes(feed(admission, RequestArrived("3", "m"))) == ["3 overloaded"]
    assert [Forward("4", "n")] == feed(admission, RequestArrived("4", "n"))
    feed(admission, RequestCancelled("0"))
    assert feed(admission, RequestArrived("5", "m")) == []


def test_requests_above_the_byte_limit_are_overloaded(admission):
    admission.max_bytes = 100
    feed(admission, ModelChanged("m", "ready"), ModelChanged("n", "ready"))

    assert [Forward("1", "m")] == feed(
        admission, RequestArrived("1", "m", 150)
    )  # the only request of a model may exceed the limit
    assert codes(feed(admission, RequestArrived("2", "m", 1))) == ["2 overloaded"]
    assert [Forward("3", "n"), Forward("4", "n")] == feed(
        admission, RequestArrived("3", "n", 60), RequestArrived("4", "n", 40)
    )
    assert codes(feed(admission, RequestArrived("5", "n", 1))) == ["5 overloaded"]
    feed(admission, RequestFinished("3"), RequestFinished("1"))
    assert [Forward("6", "n")] == feed(admission, RequestArrived("6", "n", 60))
    assert admission.sizes == {"n": 100}


def test_waiting_requests_fail_when_memory_is_missing(admission):
    feed(admission, ModelChanged("m", "waiting"), RequestArrived("1", "m"))

    assert feed(admission, ModelChanged("m", "waiting", DIED)) == []
    assert codes(feed(admission, ModelChanged("m", "waiting", MEMORY))) == ["1 insufficient_memory"]
    assert feed(admission, RequestArrived("2", "m")) == []


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (ModelChanged("m", "closing"), "draining"),
        (ModelChanged("m", "failed", FAILED), "model_failed"),
        (ModelRemoved("m"), "draining"),
    ],
)
def test_waiting_requests_end_with_their_model(admission, event, code):
    feed(admission, ModelChanged("m", "waiting"), ModelChanged("n", "waiting"))
    feed(admission, RequestArrived("1", "m"), RequestArrived("2", "n"))

    assert [f"1 {code}"] == codes(feed(admission, event))
    assert list(admission.requests) == ["2"]


def test_an_unload_during_an_eviction_ends_waiting_requests_as_any_unload_does(admission):
    feed(admission, ModelChanged("m", "ready"), ModelEvicting("m"), RequestArrived("1", "m"))
    assert feed(admission, ModelChanged("m", "closing")) == []

    assert codes(feed(admission, ModelRemoved("m"))) == ["1 draining"]


def test_lost_requests_go_to_the_next_process_in_order(admission):
    admission.max_requests = 4
    feed(
        admission,
        ModelChanged("m", "ready"),
        RequestArrived("1", "m"),
        RequestArrived("2", "m"),
        RequestArrived("3", "m"),
    )

    lost = feed(admission, RequestsLost("m", ["1", "2"], DIED))
    assert lost == [ReportPaused("1"), ReportPaused("2")]
    assert (
        feed(
            admission, RequestReturned("3"), RequestArrived("4", "m"), ModelChanged("m", "waiting")
        )
        == []
    )
    back = feed(admission, ModelChanged("m", "ready"))
    assert back == [Forward(rid, "m") for rid in "1234"]


def test_requests_end_with_a_process_that_is_not_restarted(admission):
    feed(admission, ModelChanged("m", "ready"), RequestArrived("1", "m"), RequestArrived("2", "m"))

    assert codes(feed(admission, RequestsLost("m", ["1"], DIED, again=False))) == ["1 worker_died"]
    feed(admission, RequestsLost("m", ["2"], DIED))
    assert codes(feed(admission, ModelChanged("m", "failed", FAILED))) == ["2 model_failed"]


def test_lost_requests_wait_for_memory_and_new_ones_fail(admission):
    feed(
        admission,
        ModelChanged("m", "ready"),
        RequestArrived("1", "m"),
        RequestsLost("m", ["1"], DIED),
    )
    feed(admission, RequestArrived("2", "m"))

    assert codes(feed(admission, ModelChanged("m", "waiting", MEMORY))) == ["2 insufficient_memory"]
    assert feed(admission, ModelChanged("m", "ready")) == [Forward("1", "m")]


def test_suspects_are_tried_in_halves_and_one_that_dies_alone_is_quarantined(admission):
    admission.max_requests = 4
    died = ErrorInfo("worker_died", "the worker of m was ended by SIGSEGV")
    feed(admission, ModelChanged("m", "ready"), *(RequestArrived(rid, "m") for rid in "123"))
    feed(
        admission,
        RequestProgressed("3"),
        RequestsLost("m", ["1", "2", "3"], died, attributable=True),
    )

    assert feed(admission, ModelChanged("m", "ready")) == [Forward("1", "m"), Forward("2", "m")]
    lost = feed(admission, RequestsLost("m", ["1", "2"], died, attributable=True))
    assert lost == [ReportPaused("1"), ReportPaused("2")]
    assert feed(admission, ModelChanged("m", "ready"), RequestArrived("4", "m")) == [
        Forward("1", "m")
    ]
    blame, end = feed(admission, RequestsLost("m", ["1"], died, attributable=True))
    assert blame == ReportBlame("m", died.message)
    assert isinstance(end, FailRequest)
    assert (end.rid, end.error.code, end.error.retryable) == ("1", "quarantined", False)
    assert end.error.detail["story"] == [
        "the worker of m was ended by SIGSEGV; 3 inside, 2 without a new token",
        "the worker of m was ended by SIGSEGV; 2 inside, 2 without a new token",
        "the worker of m was ended by SIGSEGV; 1 inside, 1 without a new token",
    ]
    assert feed(admission, ModelChanged("m", "ready")) == [Forward("2", "m")]
    assert feed(admission, RequestProgressed("2")) == [Forward("3", "m")]
    assert feed(admission, RequestFinished("3")) == [Forward("4", "m")]


def test_forwarded_requests_end_when_the_model_is_removed(admission):
    feed(
        admission,
        ModelChanged("m", "ready"),
        RequestArrived("1", "m"),
        ModelChanged("m", "failed", FAILED),
    )

    assert codes(feed(admission, ModelRemoved("m"))) == ["1 model_failed"]
    assert (
        feed(
            admission,
            RequestReturned("1"),
            RequestFinished("1"),
            RequestCancelled("1"),
            RequestsLost("m", ["1"], DIED),
        )
        == []
    )


def test_a_request_returned_by_a_closing_model_ends(admission):
    feed(
        admission,
        ModelChanged("m", "ready"),
        RequestArrived("1", "m"),
        ModelChanged("m", "closing"),
    )

    assert codes(feed(admission, RequestReturned("1"))) == ["1 draining"]


def test_cancel(admission):
    feed(admission, ModelChanged("m", "waiting"), ModelChanged("n", "ready"))
    feed(
        admission,
        RequestArrived("1", "m"),
        RequestArrived("2", "n"),
        RequestArrived("3", "n"),
        RequestArrived("4", "n"),
    )

    assert [ConfirmCancel("1")] == feed(admission, RequestCancelled("1"))
    assert [CancelInWorker("2", "n")] == feed(
        admission, RequestCancelled("2"), RequestCancelled("2")
    )
    feed(admission, RequestCancelled("3"), RequestCancelled("4"))
    assert [ConfirmCancel("3")] == feed(admission, RequestReturned("3"))
    assert [ConfirmCancel("4")] == feed(admission, RequestsLost("n", ["4"], DIED))
    assert list(admission.requests) == ["2"]


def test_waiting_requests_end_at_their_deadline_and_forwarded_ones_do_not(admission):
    feed(admission, ModelChanged("m", "waiting"), ModelChanged("n", "ready"))
    feed(
        admission,
        RequestArrived("1", "m", deadline=5.0),
        RequestArrived("2", "m"),
        RequestArrived("3", "n", deadline=1.0),
    )

    assert admission.deadline == 5.0
    assert admission.handle(AlarmFired(), 4.9) == []
    assert codes(admission.handle(AlarmFired(), 5.0)) == ["1 deadline_exceeded"]
    assert (list(admission.requests), admission.deadline) == (["2", "3"], None)
    feed(admission, ModelChanged("n", "waiting"), RequestReturned("3"))
    assert admission.deadline == 1.0
    assert codes(admission.handle(AlarmFired(), 6.0)) == ["3 deadline_exceeded"]


def test_a_drain_ends_with_the_last_request(admission):
    feed(admission, ModelChanged("m", "ready"), RequestArrived("1", "m"), RequestArrived("2", "m"))

    assert feed(admission, DrainStarted()) == []
    assert codes(feed(admission, RequestArrived("3", "m"))) == ["3 draining"]
    assert feed(admission, RequestFinished("1")) == []
    assert [Drained()] == feed(admission, RequestFinished("2"))
    assert [Drained()] == feed(admission, DrainStarted())


class Walk(RuleBasedStateMachine):
    """Random events in any order: each request that arrives ends exactly once."""

    models = st.sampled_from(["m", "n"])

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(max_requests=4)
        self.open: set[str] = set()
        self.inside: set[str] = set()
        self.count = 0
        self.now = 0.0

    def feed(self, event: Event) -> None:
        for command in self.admission.handle(event, self.now):
            match command:
                case Forward(rid=rid, model=model):
                    assert self.admission.models[model].availability == "ready"
                    assert rid not in self.inside
                    self.inside.add(rid)
                case FailRequest(rid=rid) | ConfirmCancel(rid=rid):
                    self.open.remove(rid)
                    self.inside.discard(rid)
                case ReportPaused(rid=rid):
                    assert rid in self.open
                case CancelInWorker(rid=rid):
                    assert rid in self.inside
                case Drained():
                    assert not self.open

    def pick_inside(self, data) -> str | None:
        return data.draw(st.sampled_from(sorted(self.inside))) if self.inside else None

    @rule(model=models, availability=st.sampled_from(["waiting", "ready", "closing", "failed"]))
    def model_is(self, model, availability):
        self.feed(ModelChanged(model, availability, FAILED if availability == "failed" else None))

    @rule(model=models)
    def model_gone(self, model):
        self.feed(ModelRemoved(model))

    @rule(model=models, wait_s=st.none() | st.integers(0, 3))
    def arrive(self, model, wait_s):
        self.count += 1
        self.open.add(str(self.count))
        deadline = None if wait_s is None else self.now + wait_s
        self.feed(RequestArrived(str(self.count), model, deadline=deadline))

    @rule()
    def fire_alarm(self):
        self.now += 1.0
        self.feed(AlarmFired())
        assert self.admission.deadline is None or self.admission.deadline > self.now

    @rule(data=st.data(), how=st.sampled_from(["over", "bounced"]))
    def leave(self, data, how):
        rid = self.pick_inside(data)
        if rid is None:
            return
        self.inside.discard(rid)
        if how == "over":
            self.open.remove(rid)
            self.feed(RequestFinished(rid))
        else:
            if self.admission.models.get(self.admission.requests[rid].model) is not None:
                self.model_is(self.admission.requests[rid].model, "waiting")
            self.feed(RequestReturned(rid))

    @rule(model=models, held=st.booleans())
    def hold(self, model, held):
        self.feed(ModelHeld(model, held))

    @rule(data=st.data())
    def queue_in_worker(self, data):
        if rid := self.pick_inside(data):
            self.feed(QueuedInWorker(rid))

    @rule(data=st.data())
    def progress(self, data):
        if rid := self.pick_inside(data):
            self.feed(RequestProgressed(rid))

    @rule(model=models, data=st.data(), attributable=st.booleans(), again=st.booleans())
    def die(self, model, data, attributable, again):
        """End the process with some of the forwarded requests; the others have not reached it."""
        given = [rid for rid in sorted(self.inside) if self.admission.requests[rid].model == model]
        had = [rid for rid in given if data.draw(st.booleans())]
        self.inside -= set(had)
        self.feed(RequestsLost(model, had, DIED, attributable, again))
        if model in self.admission.models:
            self.model_is(model, "waiting" if again else "closing")
        for rid in set(given) - set(had):
            self.inside.discard(rid)
            self.feed(RequestReturned(rid))

    @rule(rid=st.integers(1, 30).map(str))
    def cancel(self, rid):
        self.feed(RequestCancelled(rid))

    @rule()
    def drain_late(self):
        if self.count > 15:
            self.feed(DrainStarted())

    @invariant()
    def consistent(self):
        self.admission.check()
        assert self.open == set(self.admission.requests)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
