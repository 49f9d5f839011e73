"""`PageBudget`: the worker's grant, its memory requests, and the daemon's answers."""

from __future__ import annotations

import pytest

from kvd.worker.scheduling.budget import PageBudget, load_refusal
from protocol.worker import Grant, MemoryRequested

MIB = 2**20


def new_budget() -> PageBudget:
    return PageBudget(base_bytes=1000, page_bytes=10, granted_bytes=1105, seq=2)


def request_of(budget: PageBudget, missing: int) -> MemoryRequested:
    request = budget.request(missing)
    assert request is not None
    return request


def deny(budget: PageBudget, missing: int, limit_bytes: int = 5000) -> None:
    request = request_of(budget, missing)
    budget.answer(
        Grant(
            seq=request.seq,
            total_bytes=budget.granted_bytes,
            granted=False,
            limit_bytes=limit_bytes,
        )
    )


def test_pages_are_the_grant_minus_the_base() -> None:
    assert new_budget().pages == 10
    assert PageBudget(base_bytes=1000, page_bytes=10, granted_bytes=900).pages == 0


def test_one_memory_request_is_open_at_a_time() -> None:
    budget = new_budget()
    request = request_of(budget, 7)

    assert (request.seq, request.total_bytes) == (3, 1170)
    assert budget.request(9) is None
    budget.answer(Grant(seq=3, total_bytes=1170, granted=True))
    assert budget.pages == 17
    assert budget.request(0) is None
    assert budget.request(1) is not None


def test_a_denial_covers_larger_memory_requests_only() -> None:
    budget = new_budget()
    deny(budget, 7)

    assert budget.pages == 10
    assert budget.request(7) is None
    assert budget.request(8) is None
    assert request_of(budget, 6).total_bytes == 1160


def test_requests_beyond_the_budget_are_refused_with_the_numbers() -> None:
    budget = new_budget()
    assert not budget.too_large(10**9)  # the budget is not known yet
    deny(budget, 7, limit_bytes=1170)
    assert not budget.too_large(17)
    assert budget.too_large(18)
    detail = budget.refusal(18).detail
    assert (detail["base_bytes"], detail["page_bytes"]) == (1000, 10)
    assert (detail["needed_bytes"], detail["limit_bytes"]) == (1180, 1170)


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (250, "but only 130.0 MiB of the budget of 300.0 MiB are free (a holds 170.0 MiB): unpin"),
        (180, "but only 130.0 MiB of the budget of 300.0 MiB are free (a holds 170.0 MiB): unload"),
        (301, "the model needs 301.0 MiB (weights), more than the whole budget of 300.0 MiB"),
    ],
)
def test_a_refused_load_names_the_whole_budget_and_what_holds_it(needed: int, text: str) -> None:
    grant = Grant(
        seq=1,
        total_bytes=30 * MIB,
        granted=False,
        available_bytes=100 * MIB,
        limit_bytes=200 * MIB,
        budget_bytes=300 * MIB,
        reason="a holds 170.0 MiB",
    )
    error = load_refusal(needed * MIB, "weights", grant)
    assert text in error.message
    assert (error.detail["available_bytes"], error.detail["budget_bytes"]) == (130 * MIB, 300 * MIB)


def test_a_load_refused_for_the_hosts_memory_names_that_memory() -> None:
    grant = Grant(
        seq=1,
        total_bytes=0,
        granted=False,
        available_bytes=100 * MIB,
        budget_bytes=300 * MIB,
        reason="a (pinned) holds 170.0 MiB",
        host_bytes=150 * MIB,
    )
    error = load_refusal(30 * MIB, "weights", grant)
    assert "need 150.0 MiB of the host's memory, but only 100.0 MiB" in error.message
    assert "(a (pinned) holds 170.0 MiB): unload a model" in error.message
    assert error.detail["needed_bytes"] == 150 * MIB


def test_giving_back_replaces_an_open_memory_request() -> None:
    budget = new_budget()
    request = request_of(budget, 5)
    given = budget.give_back(4)
    assert given is not None
    assert (given.seq, given.total_bytes) == (request.seq + 1, 1040)
    budget.answer(Grant(seq=request.seq, total_bytes=1155, granted=True))
    assert budget.pages == 4
    assert budget.give_back(4) is None


def test_the_grant_shrinks_before_the_answer() -> None:
    """The daemon counts the memory as free when it reads the memory request."""
    budget = new_budget()

    assert budget.give_back(10) is None
    request = budget.give_back(4)
    assert request is not None
    assert request.total_bytes == 1040
    assert budget.pages == 4
    assert budget.request(1) is None
    budget.answer(Grant(seq=request.seq, total_bytes=1040, granted=True))
    assert budget.pages == 4


def test_withdrawing_replaces_the_memory_request_that_the_daemon_remembers() -> None:
    budget = new_budget()
    assert budget.withdraw() is None
    deny(budget, 7)
    request = budget.withdraw()

    assert request is not None
    assert request.total_bytes == 1105
    assert budget.denied is None


def test_a_forgotten_denial_is_still_withdrawn() -> None:
    """The worker forgets a denial when it frees memory, but the daemon remembers the request."""
    budget = new_budget()
    deny(budget, 7)
    budget.denied = None
    assert budget.withdraw() is not None
    assert budget.withdraw() is None  # a memory request is open
    budget.answer(Grant(seq=budget.seq, total_bytes=1105, granted=True))
    assert budget.withdraw() is None


def test_an_answer_to_an_older_memory_request_is_ignored() -> None:
    """The daemon answers in order: the open memory request is answered later."""
    budget = new_budget()
    request = request_of(budget, 5)
    budget.answer(Grant(seq=request.seq - 1, total_bytes=1200, granted=True))

    assert budget.pages == 10
    assert budget.open_bytes == 1150
