"""Plans how to free the missing memory: the cheapest actions that cover it, and no other. Pure.

`kvctl explain` shows the plan, and the governor starts its first method and then plans again.
"""

from __future__ import annotations

from copy import copy

from msgspec.structs import replace

from actors.machines.reclaim_order import MemoryView, Method, ReclaimAction, Shortfall, actions


def plan(shortfall: Shortfall, missing: int, view: MemoryView) -> list[ReclaimAction]:
    """Return what frees ``missing`` bytes, in the order of use; all actions if they free less.

    Includes models that are busy with another `Reclaim`, and no method that gave nothing recently.
    """
    steps: list[ReclaimAction] = []
    after, remaining = view, missing
    for method in shortfall.methods:
        while remaining > 0 and (found := _usable(method, shortfall, after)):
            steps.append(found[0])
            remaining -= found[0].nbytes
            after = _after(found[0], after)
    return steps if remaining > 0 else _needed(steps, missing, view)


def _usable(method: Method, shortfall: Shortfall, view: MemoryView) -> list[ReclaimAction]:
    found = actions(method, shortfall, view)
    return [it for it in found if method not in view.accounts[it.model].barren]


def _after(action: ReclaimAction, view: MemoryView) -> MemoryView:
    """Return the view once the action is done. The given one stays as it is."""
    accounts, grants = dict(view.accounts), dict(view.grants)
    if action.worker_method is None:
        del accounts[action.model]
        grants.pop(action.model, None)
    else:
        account = accounts[action.model] = copy(view.accounts[action.model])
        account.deduct(action.worker_method, action.level, action.nbytes, exhausted=True)
        grants[action.model] = view.granted(action.model) - action.nbytes
    return replace(view, accounts=accounts, grants=grants)


def _needed(steps: list[ReclaimAction], missing: int, view: MemoryView) -> list[ReclaimAction]:
    """Return the steps without those that the others make unnecessary.

    Only an eviction frees more than is asked for, so only a plan that ends with one has such steps.
    The first to go are those that cost quality, lowest precision first, then the most expensive.
    """
    evicted = {it.model for it in steps if it.worker_method is None}
    needed = [
        it if it.worker_method else replace(it, nbytes=view.granted(it.model))
        for it in steps
        if it.worker_method is None or it.model not in evicted
    ]
    if not steps or steps[-1].worker_method:
        return needed
    excess = sum(it.nbytes for it in needed) - missing
    step_downs = [it for it in reversed(needed) if it.method == "precision"]
    others = [it for it in reversed(needed) if it.method != "precision"]
    for step in step_downs + others:
        # Every model reaches a level before any goes below it.
        lower = any(it.level > step.level for it in needed) and step.method == "precision"
        if step.nbytes <= excess and not lower:
            needed.remove(step)
            excess -= step.nbytes
    return needed
