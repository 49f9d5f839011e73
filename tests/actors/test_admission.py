"""The router's machine: each request ends once, and goes to a worker only when that is ready."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.machines.admission import (
    Arrived,
    Blame,
    Bounced,
    Desk,
    DrainAll,
    End,
    EndCancelled,
    Event,
    Forward,
    Gained,
    Kept,
    LinedUp,
    ModelGone,
    ModelIs,
    Over,
    Quiet,
    Rang,
    RowsLost,
    Summon,
    Suspend,
    Unwanted,
    Withdraw,
)
from protocol.errors import ErrorInfo

DIED = ErrorInfo("worker_died", "died", True)
FAILED = ErrorInfo("model_failed", "gave up")
MEMORY = ErrorInfo("insufficient_memory", "no room")


@pytest.fixture
def desk():
    """A desk whose invariants are checked at the end."""
    subject = Desk(most=3)
    yield subject
    subject.check()


def feed(desk: Desk, *events: Event):
    commands = [command for event in events for command in desk.handle(event, 0.0)]
    desk.check()
    return commands


def codes(commands) -> list[str]:
    return [f"{c.rid} {c.error.code}" for c in commands if isinstance(c, End)]


def test_a_request_for_a_ready_model_goes_there(desk):
    commands = feed(desk, ModelIs("m", "ready"), Arrived("1", "m"))

    assert [Forward("1", "m")] == commands
    assert feed(desk, Over("1")) == []
    assert desk.requests == {}


def test_requests_wait_for_their_model_in_order(desk):
    feed(desk, ModelIs("m", "waiting"), Arrived("2", "m"), Arrived("1", "m"))

    assert [Forward("2", "m"), Forward("1", "m")] == feed(desk, ModelIs("m", "ready"))


@pytest.mark.parametrize(
    ("standing", "code"), [("closing", "draining"), ("failed", "model_failed")]
)
def test_refusals(desk, standing, code):
    feed(desk, ModelIs("m", standing, FAILED if standing == "failed" else None))

    assert [f"1 {code}"] == codes(feed(desk, Arrived("1", "m")))


def test_a_model_that_is_not_here_is_asked_for_once(desk):
    assert feed(desk, Arrived("1", "m"), Arrived("2", "m")) == [Summon("m")]
    assert feed(desk, ModelIs("m", "waiting")) == []
    assert feed(desk, ModelIs("m", "ready")) == [Forward("1", "m"), Forward("2", "m")]


def test_where_nobody_knows_the_model_those_that_wait_end(desk):
    feed(desk, Arrived("1", "m", deadline=5.0), Arrived("2", "m"))
    assert codes(desk.handle(Rang(), 5.0)) == ["1 deadline_exceeded"]
    error = ErrorInfo("unknown_model", "no model 'm' is loaded")

    assert feed(desk, ModelGone("m", error)) == [End("2", error)]
    assert feed(desk, Arrived("3", "m")) == [Summon("m")]  # it may be known by now
    assert feed(desk, Unwanted("3")) == [EndCancelled("3")]


def test_too_many_are_overloaded(desk):
    feed(desk, ModelIs("m", "waiting"), ModelIs("n", "ready"))
    feed(desk, *(Arrived(str(n), "m") for n in range(3)))

    assert codes(feed(desk, Arrived("3", "m"))) == ["3 overloaded"]
    assert [Forward("4", "n")] == feed(desk, Arrived("4", "n"))
    feed(desk, Unwanted("0"))
    assert feed(desk, Arrived("5", "m")) == []


def test_too_many_bytes_are_overloaded(desk):
    desk.most_bytes = 100
    feed(desk, ModelIs("m", "ready"), ModelIs("n", "ready"))

    assert [Forward("1", "m")] == feed(desk, Arrived("1", "m", 150))  # alone it may have more
    assert codes(feed(desk, Arrived("2", "m", 1))) == ["2 overloaded"]
    assert [Forward("3", "n"), Forward("4", "n")] == feed(
        desk, Arrived("3", "n", 60), Arrived("4", "n", 40)
    )
    assert codes(feed(desk, Arrived("5", "n", 1))) == ["5 overloaded"]
    feed(desk, Over("3"), Over("1"))
    assert [Forward("6", "n")] == feed(desk, Arrived("6", "n", 60))
    assert desk.sizes == {"n": 100}


def test_those_that_wait_are_told_that_memory_is_missing(desk):
    feed(desk, ModelIs("m", "waiting"), Arrived("1", "m"))

    assert feed(desk, ModelIs("m", "waiting", DIED)) == []
    assert codes(feed(desk, ModelIs("m", "waiting", MEMORY))) == ["1 insufficient_memory"]
    assert feed(desk, Arrived("2", "m")) == []


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (ModelIs("m", "closing"), "draining"),
        (ModelIs("m", "failed", FAILED), "model_failed"),
        (ModelGone("m"), "unknown_model"),
    ],
)
def test_those_that_wait_end_with_their_model(desk, event, code):
    feed(desk, ModelIs("m", "waiting"), ModelIs("n", "waiting"))
    feed(desk, Arrived("1", "m"), Arrived("2", "n"))

    assert [f"1 {code}"] == codes(feed(desk, event))
    assert list(desk.requests) == ["2"]


def test_those_that_a_process_took_with_it_go_into_the_next_one_in_their_order(desk):
    desk.most = 4
    feed(desk, ModelIs("m", "ready"), Arrived("1", "m"), Arrived("2", "m"), Arrived("3", "m"))

    lost = feed(desk, RowsLost("m", ["1", "2"], DIED))
    assert lost == [Suspend("1"), Suspend("2")]
    assert feed(desk, Bounced("3"), Arrived("4", "m"), ModelIs("m", "waiting")) == []
    back = feed(desk, ModelIs("m", "ready"))
    assert back == [Forward(rid, "m") for rid in "1234"]


def test_those_of_a_process_that_is_the_last_one_end_with_it(desk):
    feed(desk, ModelIs("m", "ready"), Arrived("1", "m"), Arrived("2", "m"))

    assert codes(feed(desk, RowsLost("m", ["1"], DIED, again=False))) == ["1 worker_died"]
    feed(desk, RowsLost("m", ["2"], DIED))
    assert codes(feed(desk, ModelIs("m", "failed", FAILED))) == ["2 model_failed"]


def test_what_was_begun_waits_for_memory_and_others_are_told(desk):
    feed(desk, ModelIs("m", "ready"), Arrived("1", "m"), RowsLost("m", ["1"], DIED))
    feed(desk, Arrived("2", "m"))

    assert codes(feed(desk, ModelIs("m", "waiting", MEMORY))) == ["2 insufficient_memory"]
    assert feed(desk, ModelIs("m", "ready")) == [Forward("1", "m")]


def test_suspects_are_tried_in_halves_and_who_dies_alone_is_quarantined(desk):
    desk.most = 4
    died = ErrorInfo("worker_died", "the worker of m was ended by SIGSEGV")
    feed(desk, ModelIs("m", "ready"), *(Arrived(rid, "m") for rid in "123"))
    feed(desk, Gained("3"), RowsLost("m", ["1", "2", "3"], died, attributable=True))

    assert feed(desk, ModelIs("m", "ready")) == [Forward("1", "m"), Forward("2", "m")]
    lost = feed(desk, RowsLost("m", ["1", "2"], died, attributable=True))
    assert lost == [Suspend("1"), Suspend("2")]
    assert feed(desk, ModelIs("m", "ready"), Arrived("4", "m")) == [Forward("1", "m")]
    blame, end = feed(desk, RowsLost("m", ["1"], died, attributable=True))
    assert blame == Blame("m", died.message)
    assert isinstance(end, End)
    assert (end.rid, end.error.code, end.error.retryable) == ("1", "quarantined", False)
    assert end.error.detail["story"] == [
        "the worker of m was ended by SIGSEGV; 3 inside, 2 without a new token",
        "the worker of m was ended by SIGSEGV; 2 inside, 2 without a new token",
        "the worker of m was ended by SIGSEGV; 1 inside, 1 without a new token",
    ]
    assert feed(desk, ModelIs("m", "ready")) == [Forward("2", "m")]
    assert feed(desk, Gained("2")) == [Forward("3", "m")]
    assert feed(desk, Over("3")) == [Forward("4", "m")]


def test_those_on_their_way_end_when_nobody_speaks_for_them(desk):
    feed(desk, ModelIs("m", "ready"), Arrived("1", "m"), ModelIs("m", "failed", FAILED))

    assert codes(feed(desk, ModelGone("m"))) == ["1 model_failed"]
    assert feed(desk, Bounced("1"), Over("1"), Unwanted("1"), RowsLost("m", ["1"], DIED)) == []


def test_a_bounce_of_a_closing_model_ends(desk):
    feed(desk, ModelIs("m", "ready"), Arrived("1", "m"), ModelIs("m", "closing"))

    assert codes(feed(desk, Bounced("1"))) == ["1 draining"]


def test_cancel(desk):
    feed(desk, ModelIs("m", "waiting"), ModelIs("n", "ready"))
    feed(desk, Arrived("1", "m"), Arrived("2", "n"), Arrived("3", "n"), Arrived("4", "n"))

    assert [EndCancelled("1")] == feed(desk, Unwanted("1"))
    assert [Withdraw("2", "n")] == feed(desk, Unwanted("2"), Unwanted("2"))
    feed(desk, Unwanted("3"), Unwanted("4"))
    assert [EndCancelled("3")] == feed(desk, Bounced("3"))
    assert [EndCancelled("4")] == feed(desk, RowsLost("n", ["4"], DIED))
    assert list(desk.requests) == ["2"]


def test_those_that_wait_beyond_their_deadline_end_and_a_worker_keeps_what_it_has(desk):
    feed(desk, ModelIs("m", "waiting"), ModelIs("n", "ready"))
    feed(desk, Arrived("1", "m", deadline=5.0), Arrived("2", "m"), Arrived("3", "n", deadline=1.0))

    assert desk.deadline == 5.0
    assert desk.handle(Rang(), 4.9) == []
    assert codes(desk.handle(Rang(), 5.0)) == ["1 deadline_exceeded"]
    assert (list(desk.requests), desk.deadline) == (["2", "3"], None)
    feed(desk, ModelIs("n", "waiting"), Bounced("3"))
    assert desk.deadline == 1.0
    assert codes(desk.handle(Rang(), 6.0)) == ["3 deadline_exceeded"]


def test_a_drain_ends_with_the_last_request(desk):
    feed(desk, ModelIs("m", "ready"), Arrived("1", "m"), Arrived("2", "m"))

    assert feed(desk, DrainAll()) == []
    assert codes(feed(desk, Arrived("3", "m"))) == ["3 draining"]
    assert feed(desk, Over("1")) == []
    assert [Quiet()] == feed(desk, Over("2"))
    assert [Quiet()] == feed(desk, DrainAll())


class Walk(RuleBasedStateMachine):
    """Whatever order things come in: each request that arrives ends exactly once."""

    models = st.sampled_from(["m", "n"])

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(most=4)
        self.open: set[str] = set()
        self.inside: set[str] = set()
        self.count = 0
        self.now = 0.0

    def feed(self, event: Event) -> None:
        for command in self.desk.handle(event, self.now):
            match command:
                case Forward(rid=rid, model=model):
                    assert self.desk.models[model].standing == "ready"
                    assert rid not in self.inside
                    self.inside.add(rid)
                case End(rid=rid) | EndCancelled(rid=rid):
                    self.open.remove(rid)
                    self.inside.discard(rid)
                case Suspend(rid=rid):
                    assert rid in self.open
                case Withdraw(rid=rid):
                    assert rid in self.inside
                case Quiet():
                    assert not self.open

    def one_inside(self, data) -> str | None:
        return data.draw(st.sampled_from(sorted(self.inside))) if self.inside else None

    @rule(model=models, standing=st.sampled_from(["waiting", "ready", "closing", "failed"]))
    def model_is(self, model, standing):
        self.feed(ModelIs(model, standing, FAILED if standing == "failed" else None))

    @rule(model=models)
    def model_gone(self, model):
        self.feed(ModelGone(model))

    @rule(model=models, patience=st.none() | st.integers(0, 3))
    def arrive(self, model, patience):
        self.count += 1
        self.open.add(str(self.count))
        deadline = None if patience is None else self.now + patience
        self.feed(Arrived(str(self.count), model, deadline=deadline))

    @rule()
    def ring(self):
        self.now += 1.0
        self.feed(Rang())
        assert self.desk.deadline is None or self.desk.deadline > self.now

    @rule(data=st.data(), how=st.sampled_from(["over", "bounced"]))
    def leave(self, data, how):
        rid = self.one_inside(data)
        if rid is None:
            return
        self.inside.discard(rid)
        if how == "over":
            self.open.remove(rid)
            self.feed(Over(rid))
        else:
            if self.desk.models.get(self.desk.requests[rid].model) is not None:
                self.model_is(self.desk.requests[rid].model, "waiting")
            self.feed(Bounced(rid))

    @rule(model=models, held=st.booleans())
    def keep(self, model, held):
        self.feed(Kept(model, held))

    @rule(data=st.data())
    def line_up(self, data):
        if rid := self.one_inside(data):
            self.feed(LinedUp(rid))

    @rule(data=st.data())
    def gain(self, data):
        if rid := self.one_inside(data):
            self.feed(Gained(rid))

    @rule(model=models, data=st.data(), attributable=st.booleans(), again=st.booleans())
    def die(self, model, data, attributable, again):
        """The process had some of those that were given to it; the others come back later."""
        given = [rid for rid in sorted(self.inside) if self.desk.requests[rid].model == model]
        had = [rid for rid in given if data.draw(st.booleans())]
        self.inside -= set(had)
        self.feed(RowsLost(model, had, DIED, attributable, again))
        if model in self.desk.models:
            self.model_is(model, "waiting" if again else "closing")
        for rid in set(given) - set(had):
            self.inside.discard(rid)
            self.feed(Bounced(rid))

    @rule(rid=st.integers(1, 30).map(str))
    def cancel(self, rid):
        self.feed(Unwanted(rid))

    @rule()
    def drain_seldom(self):
        if self.count > 15:
            self.feed(DrainAll())

    @invariant()
    def whole(self):
        self.desk.check()
        assert self.open == set(self.desk.requests)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
