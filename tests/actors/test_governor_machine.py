"""Grants of the governor stay in the budget after any events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machines import governor_events
from actors.machines.governor import Governor
from actors.machines.governor_events import (
    AlarmFired,
    BudgetChanged,
    LoadRequested,
    MemoryMeasured,
    ModelReady,
    ModelRemoved,
    PolicyChanged,
    ReclaimableReported,
    ReclaimFinished,
)
from actors.machines.ledger import Ledger, MemoryRequest, WorkerExited
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable
from tests.actors.governor_simulation import BUDGET

MODELS = ["a", "b", "c"]
sizes = st.integers(-10, 12_000)
offers = st.builds(
    Reclaimable,
    spare=st.integers(0, 900),
    prefixes=st.integers(0, 900),
    levels=st.lists(st.integers(0, 900), max_size=2).map(tuple),
    preempt=st.integers(0, 2000),
    rows=st.integers(0, 2),
    waiting=st.integers(0, 2),
    base=st.integers(0, 4000),
)
policies = st.builds(
    ModelPolicy,
    priority=st.integers(-1, 1),
    pinned=st.booleans(),
    idle_ttl_s=st.none() | st.just(5.0),
)
names = st.sampled_from(MODELS)
events = (
    st.builds(LoadRequested, names, policies, st.booleans())
    | st.builds(PolicyChanged, names, policies)
    | st.builds(ModelReady, names)
    | st.builds(governor_events.UnloadStarted, names)
    | st.builds(governor_events.ServingChanged, names, st.booleans())
    | st.builds(ModelRemoved, names)
    | st.builds(MemoryRequest, names, st.integers(0, 9), sizes, st.booleans())
    | st.builds(WorkerExited, names)
    | st.builds(ReclaimableReported, names, offers)
    | st.builds(ReclaimFinished, names, st.integers(0, 9), st.integers(0, 900), st.booleans())
    | st.builds(
        MemoryMeasured,
        st.dictionaries(names, st.integers(0, 9000) | st.integers(0, 1 << 40)),
        st.sampled_from(["normal", "warning", "critical"]),
    )
    | st.builds(BudgetChanged, st.integers(1, 12_000))
    | st.just(AlarmFired())
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.3, 12.0, 35.0])), max_size=50))
def test_grants_stay_in_the_budget_after_any_events(history):
    governor = Governor(Ledger(BUDGET))
    now = 0.0
    ceiling = BUDGET
    for event, after in history:
        now += after
        before = governor.ledger.granted_bytes
        governor.handle(event, now)
        governor.check()

        granted, budget = governor.ledger.granted_bytes, governor.ledger.budget_bytes
        assert granted <= max(budget, before, 0)
        assert granted <= max(budget, ceiling)
        ceiling = granted
