"""The worker's side of its grant: integers only."""

from __future__ import annotations

from kvd.worker.scheduling.budget import PageBudget
from protocol.worker import Grant, MemoryRequested


def budget() -> PageBudget:
    return PageBudget(base_bytes=1000, page_bytes=10, granted_bytes=1105, seq=2)


def wish_of(mine: PageBudget, missing: int) -> MemoryRequested:
    wish = mine.request(missing)
    assert wish is not None
    return wish


def deny(mine: PageBudget, missing: int, budget_bytes: int = 5000) -> None:
    wish = wish_of(mine, missing)
    mine.answer(
        Grant(
            seq=wish.seq,
            total_bytes=mine.granted_bytes,
            granted=False,
            budget_bytes=budget_bytes,
        )
    )


def test_pages_are_what_the_grant_leaves_over_the_base() -> None:
    assert budget().pages == 10
    assert PageBudget(base_bytes=1000, page_bytes=10, granted_bytes=900).pages == 0


def test_one_wish_at_a_time_and_the_answer_counts() -> None:
    mine = budget()
    wish = wish_of(mine, 7)

    assert (wish.seq, wish.total_bytes) == (3, 1170)
    assert mine.request(9) is None
    mine.answer(Grant(seq=3, total_bytes=1170, granted=True))
    assert mine.pages == 17
    assert mine.request(0) is None
    assert mine.request(1) is not None


def test_denied_holds_for_as_much_and_more_but_not_for_less() -> None:
    mine = budget()
    deny(mine, 7)

    assert mine.pages == 10
    assert mine.request(7) is None
    assert mine.request(8) is None
    assert wish_of(mine, 6).total_bytes == 1160


def test_what_can_never_be_is_told_with_the_arithmetic() -> None:
    mine = budget()
    assert not mine.too_large(10**9)  # nobody has said how much there is
    deny(mine, 7, budget_bytes=1170)
    assert not mine.too_large(17)
    assert mine.too_large(18)
    detail = mine.refusal(18).detail
    assert (detail["base_bytes"], detail["page_bytes"]) == (1000, 10)
    assert (detail["needed_bytes"], detail["budget_bytes"]) == (1180, 1170)


def test_what_the_daemon_asked_for_goes_even_while_a_wish_is_open() -> None:
    mine = budget()
    wish = wish_of(mine, 5)
    given = mine.give_back(4)
    assert given is not None
    assert (given.seq, given.total_bytes) == (wish.seq + 1, 1040)
    mine.answer(Grant(seq=wish.seq, total_bytes=1155, granted=True))
    assert mine.pages == 4
    assert mine.give_back(4) is None


def test_what_is_given_back_is_gone_at_once() -> None:
    """Before the answer: the daemon counts it as free when it reads the wish."""
    mine = budget()

    assert mine.give_back(10) is None
    wish = mine.give_back(4)
    assert wish is not None
    assert wish.total_bytes == 1040
    assert mine.pages == 4
    assert mine.request(1) is None
    mine.answer(Grant(seq=wish.seq, total_bytes=1040, granted=True))
    assert mine.pages == 4


def test_withdrawing_replaces_the_wish_that_the_daemon_remembers() -> None:
    mine = budget()
    assert mine.withdraw() is None
    deny(mine, 7)
    wish = mine.withdraw()

    assert wish is not None
    assert wish.total_bytes == 1105
    assert mine.denied is None


def test_a_denied_wish_is_withdrawn_also_when_it_might_be_asked_again() -> None:
    """Something became free here, so the denial is forgotten; the daemon still has it in mind."""
    mine = budget()
    deny(mine, 7)
    mine.denied = None
    assert mine.withdraw() is not None
    assert mine.withdraw() is None  # one is open
    mine.answer(Grant(seq=mine.seq, total_bytes=1105, granted=True))
    assert mine.withdraw() is None


def test_answer_to_an_older_wish_changes_nothing() -> None:
    """The daemon answers in order: the open wish's total is decided after it."""
    mine = budget()
    wish = wish_of(mine, 5)
    mine.answer(Grant(seq=wish.seq - 1, total_bytes=1200, granted=True))

    assert mine.pages == 10
    assert mine.open_bytes == 1150
