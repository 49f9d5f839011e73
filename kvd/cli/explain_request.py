"""`kvctl explain --request`: why tokens of a prompt were computed instead of found in the cache."""

from __future__ import annotations

import re
import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.cli.common import CommonOptions
from kvd.cli.console import print_message
from kvd.cli.tables import fixed_column, grid, headed, number_column, text_column
from protocol.cache_outcome import REUSED, Difference, RequestOutcome
from protocol.cache_text import advice, sentence, summary
from protocol.errors import UnknownRequest

_HTTP_ID = re.compile(r"req_[0-9a-f]+")
"""Ids of HTTP's requests. Other clients choose any text, which a terminal might obey."""


def explain_requests(common: CommonOptions, request: str | None, model: str | None) -> None:
    """Print a request's page, or a table of the newest ones; ``model``: only of this one."""
    with common.connected() as client:
        explained = client.explain_requests(request)
        found = [one for one in explained if model in (None, one.model)]
        if not found and request is not None:
            raise _unknown(request, model, explained)
    if request is not None:
        for one in found:
            common.print_data(one, page(one))
    elif found or common.json:
        common.print_data(found, listing(found))
    else:
        print_message("no requests{} so far", "" if model is None else f" of {model}")


def _unknown(request: str, model: str | None, others: list[RequestOutcome]) -> UnknownRequest:
    """Return the error for a request that is not known, or only as that of ``others``."""
    if not others:
        text = f"no request {request!r} is among the newest; `kvctl explain --request` lists them"
    else:
        names = " and ".join(sorted({one.model for one in others}))
        text = f"request {request!r} belongs to {names}, not to {model}; leave the model out"
    return UnknownRequest(text, request=request)


def listing(found: list[RequestOutcome]) -> Table:
    numbers = (number_column("PROMPT"), number_column("COMPUTED"))
    table = headed(
        fixed_column("TIME"), fixed_column("ID"), fixed_column("MODEL"), *numbers,
        text_column("REASON"),
    )  # fmt: skip
    for one in found:
        outcome = one.outcome
        table.add_row(
            _clock(one.at),
            _name(one),
            one.model,
            f"{outcome.prompt_tokens:,}",
            f"{outcome.computed_tokens:,}",
            summary(outcome).partition("; ")[2].partition(": ")[2],
        )
    return table


def page(one: RequestOutcome) -> RenderableType:
    """Return the page of one request."""
    outcome = one.outcome
    head = Text.assemble((_name(one), "bold"), f"  {one.model}, {_clock(one.at)}")
    table = grid(number_column(), text_column())
    for part in outcome.parts:
        style = (
            "green" if part.reason in REUSED else "" if part.reason in {"new", "end"} else "yellow"
        )
        table.add_row(f"{part.tokens:,}", Text(sentence(outcome, part), style=style))
    parts: list[RenderableType] = [head, Text(summary(outcome).partition("; ")[0]), Text(), table]
    if outcome.difference is not None and outcome.difference.here:
        parts += [Text(), _excerpts(outcome.difference)]
    if hint := advice(outcome):
        parts += [Text(), Text(hint)]
    return Group(*parts)


def _excerpts(difference: Difference) -> Table:
    table = grid(fixed_column(style="dim"), text_column())
    for name, text in (
        ("before", difference.before),
        ("this prompt", difference.here),
        ("cached prompt", difference.cached),
    ):
        table.add_row(name, Text(repr(text)))
    return table


def _name(one: RequestOutcome) -> str:
    """Return the id that the client knows, if it is one of HTTP's."""
    return one.client_id if _HTTP_ID.fullmatch(one.client_id) else one.request


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
