"""Forecast of what a number of rows of a model would need, and how the governor would get it. Pure.

Computes what the rows cost at each precision level (`protocol.costs`, as the worker does), how many
bytes are lacking, and which actions would free them (`actors.machines.reclaim_order`, as the
governor does). Works on a copy. Does not predict what other models request in the meantime.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from msgspec.structs import replace

from actors.machines.model_accounts import ModelAccount
from actors.machines.reclaim_order import (
    RECLAIM_ORDER,
    MemoryView,
    ReclaimAction,
    Shortfall,
    actions,
    reclaimed_by,
)
from protocol.forecast import Forecast, LevelCost, ReclaimStep, Verdict
from protocol.policy import ModelPolicy

if TYPE_CHECKING:
    from actors.machines.governor import Governor
    from protocol.costs import Costs


@dataclass(frozen=True)
class Question:
    """Rows of a model that somebody asks about."""

    model: str
    costs: Costs
    schemes: list[str]
    """Of its ladder, from the top down."""
    rows: int
    context: int
    """Tokens of each."""


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
    """Answer it under the ladder's budget, with what its tenants hold and offer now."""
    model, costs = question.model, question.costs
    ledger, account = governor.ledger, governor.accounts.get(model)
    held = ledger.grants.get(model, 0)
    level = min(account.level, costs.levels - 1) if account is not None else 0
    units = _held_units(account, held, costs)
    levels = [_level(question, at, units, ledger.budget_bytes) for at in range(costs.levels)]
    lacking = max(0, levels[level].total_bytes - held - ledger.available_bytes)
    lowest = costs.total_bytes(question.rows, question.context, costs.levels - 1)
    room: list[ReclaimStep] = []
    short = lacking
    if lowest <= ledger.budget_bytes:
        savings = [
            above.total_bytes - below.total_bytes for above, below in pairwise(levels[level:])
        ]
        view = _view(governor, model, policy or ModelPolicy(), now, [*[0] * level, *savings])
        shortfall = Shortfall(
            lacking,
            "explain",
            requester=model,
            priority=view.accounts[model].policy.priority,
            total_bytes=levels[level].total_bytes,
            since=now,
        )
        room, short = make_room(shortfall, view)
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
        budget_bytes=ledger.budget_bytes,
        available_bytes=ledger.available_bytes,
        held_bytes=held,
        missing_bytes=lacking,
        steps=room,
        shortfall_bytes=short,
        verdict=_verdict(lacking, short, lowest, ledger.budget_bytes),
    )


def make_room(shortfall: Shortfall, view: MemoryView) -> tuple[list[ReclaimStep], int]:
    """Return the steps that the ladder would take, and what they leave lacking.

    ``scene``: a copy; its tenants are changed.
    """
    lacking = shortfall.nbytes
    taken: list[ReclaimStep] = []
    for method in RECLAIM_ORDER:
        while lacking > 0 and (found := actions(method, shortfall, view)):
            step = found[0]
            nbytes = step.nbytes if reclaimed_by(method) is None else min(step.nbytes, lacking)
            taken.append(
                ReclaimStep(method=method, model=step.model, nbytes=nbytes, level=step.level)
            )
            lacking -= nbytes
            view = _after(step, view)
    return taken, max(0, lacking)


def _after(step: ReclaimAction, view: MemoryView) -> MemoryView:
    """Return how it looks when that is done: what was given is not there any more."""
    method = reclaimed_by(step.method)
    accounts, grants = dict(view.accounts), dict(view.grants)
    if method is None:
        del accounts[step.model]
        grants.pop(step.model, None)
    else:
        accounts[step.model].gave(method, step.level, step.nbytes, exhausted=True)
        grants[step.model] = view.granted(step.model) - step.nbytes
    return replace(view, accounts=accounts, grants=grants)


def _view(
    governor: Governor, model: str, policy: ModelPolicy, now: float, savings: list[int]
) -> MemoryView:
    """Return a copy of what the rungs look at, in which the model wants something.

    ``savings``: by level, what its new rows would give back if they were stepped down: they pay
    like those that run.
    """
    seen = governor.view(now)
    accounts = deepcopy(dict(seen.accounts))
    account = accounts.setdefault(model, ModelAccount(model, policy))
    account.state, account.idle_since = "ready", None
    has = zip_longest(account.reclaimable.levels, savings, fillvalue=0)
    account.reclaimable = replace(account.reclaimable, levels=tuple(map(sum, has)))
    requests = {**seen.requests, model: now}
    return MemoryView(accounts, dict(seen.grants), requests, seen.budget, now, seen.least)


def _held_units(account: ModelAccount | None, held: int, costs: Costs) -> int:
    """Return what the model holds beside its base and what it would give up unasked."""
    if account is None or account.state != "ready":
        return 0
    reclaimable = account.reclaimable
    if not reclaimable.rows:
        return -(-reclaimable.prefixes // costs.unit_bytes)
    return max(0, held - reclaimable.spare - costs.base_bytes) // costs.unit_bytes


def _level(question: Question, level: int, units: int, budget: int) -> LevelCost:
    costs, rows, context = question.costs, question.rows, question.context
    return LevelCost(
        scheme=question.schemes[level] if level < len(question.schemes) else "dense",
        token_bytes=round(costs.token_bytes(level), 2),
        row_bytes=costs.row_units(context, level) * costs.unit_bytes,
        total_bytes=costs.total_bytes(rows, context, level, held_units=units),
        max_rows=costs.max_rows(budget, context, level),
    )


def _verdict(lacking: int, short: int, lowest: int, budget: int) -> Verdict:
    if lowest > budget:
        return "never"
    if not lacking:
        return "fits"
    return "waits" if short else "makes_room"
