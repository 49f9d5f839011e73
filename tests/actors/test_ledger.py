"""The ledger: grants never exceed the budget, and only events of its own model shrink a grant."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machines.ledger import Event, GrantDecision, Ledger, MemoryRequest, WorkerExited

BUDGET = 1000
MODELS = ["a", "b", "c"]

events = st.lists(
    st.builds(MemoryRequest, st.sampled_from(MODELS), st.integers(0, 99), st.integers(-5, 1200))
    | st.builds(WorkerExited, st.sampled_from(MODELS)),
    max_size=60,
)


def feed(ledger: Ledger, *events: Event) -> list[GrantDecision]:
    answers = [answer for event in events for answer in ledger.handle(event, 0.0)]
    ledger.check()
    return answers


def test_a_request_that_fits_is_granted():
    ledger = Ledger(BUDGET)

    assert [GrantDecision("a", 1, 600, True, 400)] == feed(ledger, MemoryRequest("a", 1, 600))
    assert [GrantDecision("a", 2, 700, True, 300)] == feed(ledger, MemoryRequest("a", 2, 700))
    assert [GrantDecision("b", 1, 300, True, 0)] == feed(ledger, MemoryRequest("b", 1, 300))


def test_a_request_that_does_not_fit_leaves_the_grant_unchanged():
    ledger = Ledger(BUDGET)
    feed(ledger, MemoryRequest("a", 1, 600), MemoryRequest("b", 1, 300))

    assert [GrantDecision("b", 2, 300, False, 100)] == feed(ledger, MemoryRequest("b", 2, 401))
    assert ledger.grants == {"a": 600, "b": 300}


def test_waiting_requests_are_granted_oldest_first_when_memory_is_given_back():
    ledger = Ledger(BUDGET)
    feed(
        ledger, MemoryRequest("a", 1, 1000), MemoryRequest("b", 1, 500), MemoryRequest("c", 1, 500)
    )

    assert [GrantDecision("a", 2, 400, True, 600), GrantDecision("b", 1, 500, True, 100)] == feed(
        ledger, MemoryRequest("a", 2, 400)
    )
    assert [GrantDecision("c", 1, 500, True, 0)] == feed(ledger, WorkerExited("a"))


def test_a_newer_request_replaces_the_waiting_one():
    ledger = Ledger(BUDGET)
    feed(ledger, MemoryRequest("a", 1, 900), MemoryRequest("b", 1, 500), MemoryRequest("b", 2, 50))

    assert feed(ledger, WorkerExited("a")) == []
    assert ledger.grants == {"b": 50}


def test_the_request_of_an_exited_worker_is_dropped():
    ledger = Ledger(BUDGET)
    feed(ledger, MemoryRequest("a", 1, 900), MemoryRequest("b", 1, 500), WorkerExited("b"))

    assert feed(ledger, WorkerExited("a")) == []
    assert ledger.grants == {}


@settings(deadline=None)
@given(events)
def test_grants_never_exceed_the_budget_and_only_events_of_their_model_shrink_them(history):
    ledger = Ledger(BUDGET)
    for event in history:
        before = dict(ledger.grants)
        answers = ledger.handle(event, 0.0)
        ledger.check()

        assert ledger.granted_bytes + ledger.available_bytes == BUDGET
        assert 0 <= ledger.granted_bytes <= BUDGET
        for model, held in before.items():
            if ledger.grants.get(model, 0) < held:
                assert event.model == model
                assert isinstance(event, WorkerExited) or event.total_bytes == ledger.grants[model]
        for answer in answers:
            assert ledger.grants.get(answer.model, 0) == answer.total_bytes
        if isinstance(event, MemoryRequest):
            assert (event.model, event.seq) == (answers[0].model, answers[0].seq)
