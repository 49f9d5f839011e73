"""Forecast of what a number of rows of a model would need, and how the governor would get it. Pure.

Computes what the rows cost at each precision level (`protocol.costs`, as the worker does), how many
bytes are missing, and which actions would free them (`actors.machines.reclaim_plan`, as the
governor does). Does not predict what other models request in the meantime.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from msgspec.structs import replace

from actors.machines.model_accounts import ModelAccount
from actors.machines.reclaim_order import MemoryView, Shortfall
from actors.machines.reclaim_plan import plan
from protocol.costs import RESERVED_TOKENS
from protocol.forecast import Forecast, LevelCost, ReclaimStep, Verdict
from protocol.policy import ModelPolicy

if TYPE_CHECKING:
    from actors.machines.governor import Governor
    from protocol.costs import Costs


@dataclass(frozen=True)
class Question:
    """A number of rows of a model, with `context` tokens each."""

    model: str
    costs: Costs
    schemes: list[str]
    """The model's KV schemes, by precision level."""
    rows: int
    """At most ``max_rows``."""
    context: int
    """At most the model's context."""
    max_rows: int
    """Rows that a worker runs at once; more requests wait."""


def forecast(
    question: Question,
    governor: Governor,
    now: float,
    *,
    source: str,
    state: str,
    measured: bool,
    policy: ModelPolicy | None = None,
) -> Forecast:
    """Return the forecast under the governor's budget and its current accounts.

    ``policy``: the policy of a model without an account. ``source``, ``state`` and ``measured`` go
    into the result unchanged.
    """
    model, costs = question.model, question.costs
    ledger, account = governor.ledger, governor.accounts.get(model)
    held = ledger.grants.get(model, 0)
    level = min(account.level, costs.levels - 1) if account is not None else 0
    units = _held_units(account, held, costs)
    levels = [_level_cost(question, at, units, ledger.budget_bytes) for at in range(costs.levels)]
    missing = max(0, levels[level].total_bytes - held - ledger.available_bytes)
    lowest = costs.total_bytes(question.rows, question.context, costs.levels - 1)
    steps: list[ReclaimStep] = []
    remaining = missing
    if lowest <= ledger.budget_bytes:
        savings = [
            above.total_bytes - below.total_bytes for above, below in pairwise(levels[level:])
        ]
        view = _view(governor, model, policy or ModelPolicy(), now, [*[0] * level, *savings])
        shortfall = Shortfall(
            missing,
            "explain",
            requester=model,
            priority=view.accounts[model].policy.priority,
            total_bytes=levels[level].total_bytes,
            since=now,
        )
        steps, remaining = _reclaim_steps(shortfall, view)
    return Forecast(
        model=model,
        source=source,
        state=state,
        measured=measured,
        context=question.context,
        rows=question.rows,
        weights_bytes=costs.weights_bytes,
        base_bytes=costs.base_bytes,
        idle_bytes=costs.total_bytes(0, question.context),
        levels=levels,
        level=level,
        device=governor.device,
        budget_bytes=ledger.budget_bytes,
        available_bytes=ledger.available_bytes,
        held_bytes=held,
        missing_bytes=missing,
        steps=steps,
        shortfall_bytes=remaining,
        verdict=_verdict(missing, remaining, lowest, ledger.budget_bytes),
    )


def _reclaim_steps(shortfall: Shortfall, view: MemoryView) -> tuple[list[ReclaimStep], int]:
    """Return the steps that the governor would take, and the bytes that are still missing."""
    missing = shortfall.nbytes
    steps: list[ReclaimStep] = []
    for it in plan(shortfall, missing, view):
        nbytes = min(it.nbytes, missing) if it.worker_method else it.nbytes
        steps.append(ReclaimStep(method=it.method, model=it.model, nbytes=nbytes, level=it.level))
        missing -= nbytes
    return steps, max(0, missing)


def _view(
    governor: Governor, model: str, policy: ModelPolicy, now: float, savings: list[int]
) -> MemoryView:
    """Return the governor's view, in which the model waits for memory.

    ``savings``: by level, what the question's rows would free by stepping down. They step down like
    running rows.
    """
    current = governor.view(now)
    account = copy(current.accounts.get(model, ModelAccount(model, policy)))
    account.state, account.idle_since = "ready", None
    levels = zip_longest(account.reclaimable.levels, savings, fillvalue=0)
    account.reclaimable = replace(account.reclaimable, levels=tuple(map(sum, levels)))
    return replace(
        current,
        accounts={**current.accounts, model: account},
        waiting_since={**current.waiting_since, model: now},
    )


def _held_units(account: ModelAccount | None, held: int, costs: Costs) -> int:
    """Return the units that the model holds beyond its base and its spare memory."""
    if account is None or account.state != "ready":
        return 0
    reclaimable = account.reclaimable
    if not reclaimable.rows:
        return -(-reclaimable.prefixes // costs.unit_bytes)
    return max(0, held - reclaimable.spare - costs.base_bytes) // costs.unit_bytes


def _level_cost(question: Question, level: int, units: int, budget: int) -> LevelCost:
    costs, rows, context = question.costs, question.rows, question.context
    return LevelCost(
        scheme=question.schemes[level] if level < len(question.schemes) else "dense",
        token_bytes=round(costs.token_bytes(level), 2),
        row_bytes=costs.row_units(context, level) * costs.unit_bytes,
        start_bytes=costs.row_units(min(context, RESERVED_TOKENS), level) * costs.unit_bytes,
        total_bytes=costs.total_bytes(rows, context, level, held_units=units),
        max_rows=min(question.max_rows, costs.max_rows(budget, context, level)),
    )


def _verdict(missing: int, remaining: int, lowest: int, budget: int) -> Verdict:
    if lowest > budget:
        return "never"
    if not missing:
        return "fits"
    return "waits" if remaining else "makes_room"
