"""The worker's side of its grant: integers only."""

from __future__ import annotations

import pytest

from kvd.worker.budget import PageBudget
from protocol.errors import InsufficientMemory, Overloaded
from protocol.worker import Grant, GrantWanted


def budget() -> PageBudget:
    return PageBudget(base_bytes=1000, page_bytes=10, granted_bytes=1105, seq=2)


def no(wanted: GrantWanted, total: int, budget_bytes: int = 5000) -> Grant:
    return Grant(seq=wanted.seq, total_bytes=total, granted=False, budget_bytes=budget_bytes)


def test_pages_are_what_the_grant_leaves_over_the_base() -> None:
    assert budget().pages == 10
    assert PageBudget(base_bytes=1000, page_bytes=10, granted_bytes=900).pages == 0


def test_one_request_at_a_time_and_the_answer_counts() -> None:
    mine = budget()
    wanted = mine.want(7)

    assert wanted == GrantWanted(seq=3, total_bytes=1170, reason=wanted.reason)
    assert mine.want(9) is None
    mine.answer(Grant(seq=3, total_bytes=1170, granted=True))
    assert mine.pages == 17
    assert mine.want(0) is None
    assert mine.want(1) is not None


def test_denied_is_not_asked_again_until_something_changed() -> None:
    mine = budget()
    wanted = mine.want(7)
    assert wanted is not None
    mine.answer(no(wanted, 1105))

    assert mine.pages == 10
    assert mine.want(7) is None
    mine.changed()
    assert mine.want(7) is not None


def test_refusal_tells_never_from_not_now() -> None:
    mine = budget()
    wanted = mine.want(7)
    assert wanted is not None
    mine.answer(no(wanted, 1105, budget_bytes=1169))
    never = mine.refusal(7)

    assert isinstance(never, InsufficientMemory)
    assert (never.detail["needed_bytes"], never.detail["budget_bytes"]) == (1170, 1169)
    mine.denied = no(wanted, 1105, budget_bytes=1170)
    later = mine.refusal(7)
    assert isinstance(later, Overloaded)
    assert later.info().retryable
    assert later.detail["retry_after_s"] > 0
    mine.changed()
    with pytest.raises(ValueError, match="denied"):
        mine.refusal(7)


def test_gives_back_only_what_is_above() -> None:
    mine = budget()

    assert mine.give_back(10) is None
    wanted = mine.give_back(4)
    assert wanted is not None
    assert wanted.total_bytes == 1040
    assert mine.give_back(2) is None
    mine.answer(Grant(seq=wanted.seq, total_bytes=1040, granted=True))
    assert mine.pages == 4


def test_answer_to_an_older_request_only_carries_the_total() -> None:
    mine = budget()
    wanted = mine.want(5)
    assert wanted is not None
    mine.answer(Grant(seq=wanted.seq - 1, total_bytes=1200, granted=True))

    assert mine.pages == 20
    assert mine.waiting
