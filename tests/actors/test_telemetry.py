"""`Timing`: which observations the events of a request yield, and with which times."""

from __future__ import annotations

from actors import telemetry
from actors.telemetry import Timing
from protocol import messages as m
from protocol.errors import ErrorInfo
from protocol.types import Usage


def tokens(count: int = 1, choice: int = 0) -> m.Tokens:
    return m.Tokens(id="r", index=0, tokens=[7] * count, text="x", choice=choice)


def test_first_tokens_are_timed_from_arrival_and_later_ones_from_the_previous():
    timing = Timing("m", 10.0)
    assert timing.observe_event(tokens(2), 10.5) == telemetry.TokensSent("m", 2, first_s=0.5)
    assert timing.observe_event(tokens(), 10.75) == telemetry.TokensSent("m", 1, gap_s=0.25)


def test_gaps_are_per_choice_and_the_first_token_per_request():
    timing = Timing("m", 0.0)
    assert timing.observe_event(tokens(choice=1), 1.0) == telemetry.TokensSent("m", 1, first_s=1.0)
    assert timing.observe_event(tokens(choice=0), 1.0) == telemetry.TokensSent("m", 1)
    assert timing.observe_event(tokens(choice=1), 1.5) == telemetry.TokensSent("m", 1, gap_s=0.5)
    assert timing.observe_event(tokens(choice=0), 3.0) == telemetry.TokensSent("m", 1, gap_s=2.0)


def test_an_event_with_text_and_no_tokens_is_not_observed():
    timing = Timing("m", 0.0)
    assert timing.observe_event(m.Tokens(id="r", index=3, tokens=[], text="rest"), 1.0) is None
    assert timing.observe_event(tokens(), 2.0) == telemetry.TokensSent("m", 1, first_s=2.0)


def test_only_the_first_admission_is_observed():
    timing = Timing("m", 1.0)
    assert timing.observe_admission(1.25) == telemetry.RequestAdmitted("m", 0.25)
    assert timing.observe_admission(9.0) is None, "observed the admission to the next process"


def test_the_end_of_a_request_is_observed():
    timing = Timing("m", 1.0)
    done = m.Done(id="r", reason="stop", usage=Usage(1, 1))
    assert timing.observe_event(done, 4.0) == telemetry.RequestFinished("m", "stop", 3.0)
    error = m.Error(id="r", error=ErrorInfo("overloaded", "full"))
    assert timing.observe_event(error, 4.0) == telemetry.RequestFailed("m", "overloaded")


def test_a_request_of_an_earlier_daemon_is_counted_without_times():
    timing = Timing("m")
    done = m.Done(id="r", reason="stop", usage=Usage(1, 1))
    assert timing.observe_admission(4.0) is None
    assert timing.observe_event(tokens(3), 4.0) == telemetry.TokensSent("m", 3)
    assert timing.observe_event(done, 5.0) == telemetry.RequestFinished("m", "stop", None)


def test_events_without_an_observation():
    timing = Timing("m", 0.0)
    assert timing.observe_event(m.Queued(id="r", position=2), 1.0) is None
    assert timing.observe_event(m.ChoiceFinished(id="r", choice=0, reason="stop"), 1.0) is None
