"""`kvctl models`: the models on this machine, their sizes, and whether they fit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rich_click as click
from rich.table import Table
from rich.text import Text

from kvd.cli import local_models
from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.console import print_message
from kvd.cli.local_models import LocalModel
from kvd.cli.options import Tokens
from kvd.cli.tables import fixed_column, headed, number_column, text_column
from kvd.client import Client
from kvd.host.home import locate
from kvd.host.units import format_bytes
from protocol.errors import KvdError, NotRunning
from protocol.forecast import Forecast
from protocol.types import DaemonStatus

_VERDICTS = {
    "fits": ("fits", "green"),
    "makes_room": ("fits, others make room", "yellow"),
    "waits": ("has to wait", "yellow"),
}


@dataclass(frozen=True)
class Candidate:
    """A model on this machine, and whether the daemon could load it."""

    model: LocalModel
    names: tuple[str, ...] = ()
    """Names under which it is loaded."""
    forecast: Forecast | None = None
    error: KvdError | None = None
    """Why there is no forecast."""


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    type=click.Path(path_type=Path),
    help="Folders to search too, with their subfolders.",
)
@option(
    "--ctx",
    "TOKENS",
    "Context of the one request that has to fit.",
    name="context",
    type=Tokens(1),
    default=4096,
)
@common_options()
def models(common: CommonOptions, folders: tuple[Path, ...], *, context: int) -> None:
    """Show the models on this machine: embedded, in folders, in the Hugging Face cache."""
    with common.guarded(), contextlib.ExitStack() as stack:
        found = local_models_in(common, folders)
        status: DaemonStatus | None = None
        forecast: Callable[[str], Forecast]
        try:
            client = stack.enter_context(Client(home=common.home, socket=common.socket))
            status = client.status()
            forecast = functools.partial(client.explain, rows=1, context=context)
        except NotRunning:
            if common.socket is not None:
                raise
            print_message("[dim]no daemon runs; estimates are for a new one[/]")
            forecast = _offline_forecast(common, context)
        candidates = [_with_forecast(one, forecast) for one in _candidates(found, status)]
        common.print_data([_values(candidate) for candidate in candidates], page(candidates))


def local_models_in(common: CommonOptions, folders: Iterable[Path]) -> list[LocalModel]:
    found = local_models.embedded()
    for folder in (locate(common.home).root / "models", *folders):
        found += local_models.in_folder(folder.expanduser().absolute())
    found += local_models.in_hub_cache()
    by_path = {model.path.resolve(): model for model in reversed(found)}  # the first one wins
    return list(reversed(by_path.values()))


def _candidates(found: list[LocalModel], status: DaemonStatus | None) -> list[Candidate]:
    names: dict[str, list[str]] = {}
    for model in status.models if status is not None else []:
        names.setdefault(model.source, []).append(model.name)
    return [Candidate(model, tuple(names.get(model.source, ()))) for model in found]


def _with_forecast(candidate: Candidate, forecast: Callable[[str], Forecast]) -> Candidate:
    if not candidate.model.complete:
        return candidate
    try:
        return replace(candidate, forecast=forecast(_source(candidate)))
    except NotRunning:
        raise
    except KvdError as error:
        return replace(candidate, error=error)


def _source(candidate: Candidate) -> str:
    """Return a name or path for the daemon. Not a Hub id: the daemon's Hub cache may differ."""
    if candidate.names:
        return candidate.names[0]
    model = candidate.model
    return model.source if model.kind == "embedded" else str(model.path)


def _offline_forecast(common: CommonOptions, context: int) -> Callable[[str], Forecast]:
    """Return a forecaster for a new daemon with this home's configuration and no loaded model."""
    from actors.machines.forecast import Question, forecast  # noqa: PLC0415 - without a daemon
    from actors.machines.governor import Governor  # noqa: PLC0415
    from actors.machines.ledger import Ledger  # noqa: PLC0415
    from actors.system import Settings  # noqa: PLC0415
    from kvd.config import config  # noqa: PLC0415
    from kvd.daemon.estimate import estimate, folder_of, machine  # noqa: PLC0415
    from kvd.host import memory  # noqa: PLC0415
    from protocol.kv import KVSpec  # noqa: PLC0415

    settings = config.load(locate(common.home).config)
    budget = settings.budget_bytes or memory.default_budget(memory.reader().host())
    limits = Settings(max_rows=settings.max_rows, prefill_chunk=settings.chunk)
    this_machine = machine(settings.native, limits, settings.attention)

    def estimated(source: str) -> Forecast:
        costs = estimate(folder_of(source), KVSpec(), this_machine)
        question = Question(
            source,
            costs.costs,
            costs.schemes,
            rows=1,
            context=min(context, costs.context_length),
            max_rows=settings.max_rows,
        )
        governor = Governor(Ledger(budget))
        return forecast(question, governor, 0.0, source=source, state="not loaded", measured=False)

    return estimated


def page(candidates: list[Candidate]) -> Table:
    table = headed(
        text_column("MODEL", style="bold", min_width=24),
        fixed_column("KIND"),
        number_column("SIZE"),
        number_column("NEEDS"),
        text_column("FITS"),
    )
    loaded = any(candidate.names for candidate in candidates)
    if loaded:
        table.add_column("LOADED AS", overflow="fold")
    for candidate in candidates:
        model, forecast = candidate.model, candidate.forecast
        needs = format_bytes(forecast.levels[forecast.level].total_bytes) if forecast else ""
        table.add_row(
            Text(model.source),
            model.kind,
            format_bytes(model.weights_bytes) if model.weights_bytes else "",
            needs,
            _fits(candidate),
            *([Text(", ".join(candidate.names))] if loaded else []),
        )
    return table


def _fits(candidate: Candidate) -> Text:
    if not candidate.model.complete:
        hub = candidate.model.kind == "hub"
        return Text("not completely downloaded" if hub else "has no weights", "dim")
    if candidate.error is not None:
        return Text(candidate.error.message, "red")
    forecast = candidate.forecast
    assert forecast is not None
    if forecast.verdict in _VERDICTS:
        return Text(*_VERDICTS[forecast.verdict])
    least, budget = forecast.levels[-1].total_bytes, forecast.budget_bytes
    return Text(f"never: {format_bytes(least)} of {format_bytes(budget)}", "red")


def _values(candidate: Candidate) -> dict[str, Any]:
    values: dict[str, Any] = asdict(candidate.model)
    values |= {"path": str(candidate.model.path), "loaded_as": candidate.names}
    if candidate.forecast is not None:
        values["forecast"] = candidate.forecast
    if candidate.error is not None:
        values["error"] = candidate.error.info()
    return values
