"""The plan to free memory covers what is missing, if possible, and has no step too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.machines.model_accounts import ModelAccount
from actors.machines.reclaim_order import RECLAIM_ORDER, MemoryView, ReclaimAction, Shortfall
from actors.machines.reclaim_plan import plan
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable

NOW = 1000.0


def account(name: str, *, idle: bool = False, priority: int = 0, **reclaimable) -> ModelAccount:
    return ModelAccount(
        name,
        ModelPolicy(priority=priority),
        state="ready",
        idle_since=0.0 if idle else None,
        reclaimable=Reclaimable(**reclaimable),
    )


def view_of(*accounts: ModelAccount, **grants: int) -> MemoryView:
    return MemoryView({it.name: it for it in accounts}, grants, {}, sum(grants.values()), NOW)


def freed(steps: list[ReclaimAction], missing: int) -> int:
    """Return the bytes that the steps free. Only the last one's amount is not used up."""
    total = sum(it.nbytes for it in steps)
    return missing if steps and steps[-1].worker_method and total > missing else total


def test_an_eviction_that_covers_the_need_replaces_step_downs_and_prefixes():
    """166 of 463 MB are missing. The eviction of the idle model alone frees 198."""
    view = view_of(
        account("busy", rows=3, levels=(3, 1), prefixes=5),
        account("idle", idle=True),
        busy=265,
        idle=198,
    )
    assert plan(Shortfall(166, "a load"), 166, view) == [ReclaimAction("idle", "idle", 198)]


def test_what_a_step_down_covers_alone_costs_no_model():
    view = view_of(
        account("busy", rows=3, levels=(30,)), account("idle", idle=True), busy=265, idle=198
    )
    assert plan(Shortfall(20, "a load"), 20, view) == [ReclaimAction("precision", "busy", 30, 1)]


def test_a_method_that_gave_nothing_recently_is_not_planned():
    barren = account("busy", rows=3, levels=(30,))
    barren.barren["precision"] = NOW + 1
    view = view_of(barren, account("idle", idle=True), busy=265, idle=198)
    assert plan(Shortfall(20, "a load"), 20, view) == [ReclaimAction("idle", "idle", 198)]


nbytes = st.integers(0, 400)
accounts = st.builds(
    account,
    st.just(""),
    idle=st.booleans(),
    priority=st.integers(-1, 1),
    spare=nbytes,
    prefixes=nbytes,
    levels=st.lists(nbytes, max_size=2).map(tuple),
    preempt=nbytes,
    rows=st.integers(0, 3),
)


@given(st.lists(st.tuples(accounts, st.integers(0, 2000)), max_size=5), st.integers(1, 4000))
def test_a_plan_covers_the_need_if_possible_and_has_no_step_too_many(drawn, missing):
    for number, (it, _) in enumerate(drawn):
        it.name = f"m{number}"
    view = view_of(*(it for it, _ in drawn), **{it.name: 2000 + granted for it, granted in drawn})
    shortfall = Shortfall(missing, "a load")
    steps = plan(shortfall, missing, view)
    everything = sum(it.nbytes for it in plan(shortfall, 1 << 40, view))

    assert (freed(steps, missing) >= missing) == (everything >= missing)
    order = [(RECLAIM_ORDER.index(it.method), it.level) for it in steps]
    assert order == sorted(order)
    if freed(steps, missing) < missing:
        return
    evicted = {it.model for it in steps if it.worker_method is None}
    assert not [it for it in steps if it.worker_method and it.model in evicted]
    lowest = max((it.level for it in steps), default=0)
    for step in steps:
        if step.level == lowest or step.method != "precision":
            assert freed(steps, missing) - step.nbytes < missing
