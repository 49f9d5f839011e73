"""`kvctl models`: what lies on this machine to be loaded, how large it is, and whether it fits."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvd.cli import local_models
from kvd.cli.common import (
    HomeOption,
    JsonOption,
    SocketOption,
    Terms,
    stdout_console,
    talk,
    terms,
)
from kvd.client import Client
from kvd.host.home import locate
from kvd.host.units import format_bytes
from protocol.errors import KvdError, NotRunning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocol.forecast import Forecast
    from protocol.types import DaemonStatus

_GAP = 2
_CONTEXT = 4096
_SAID = {
    "fits": ("fits", "green"),
    "makes_room": ("fits, others make room", "yellow"),
    "waits": ("has to wait", "yellow"),
}


@dataclass(frozen=True)
class Known:
    """A model on this machine, and what would become of a load."""

    found: local_models.Found
    names: tuple[str, ...] = ()
    """Under which it is loaded."""
    forecast: Forecast | None = None
    error: KvdError | None = None
    """Why there is none."""


def models(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="Look there too, and in folders below."),
    ] = None,
    *,
    ctx: Annotated[
        int,
        typer.Option("--ctx", metavar="TOKENS", min=1, help="Would one request of so many fit?"),
    ] = _CONTEXT,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the models on this machine: embedded, in folders, in the Hugging Face cache."""
    wanted = terms(context, home, socket, json=json)
    with wanted.guarded(), contextlib.ExitStack() as stack:
        found = there(wanted, folders or [])
        try:
            client = stack.enter_context(Client(home=wanted.home, socket=wanted.socket))
            status: DaemonStatus | None = client.status()
            ask: Callable[[str], Forecast] = _asking(client, ctx)
        except NotRunning:
            if wanted.socket is not None:
                raise
            talk("[dim]no daemon runs; a fresh one with this configuration is reckoned with[/]")
            status, ask = None, _alone(wanted, ctx)
        known = [_judged(one, ask) for one in _named(found, status)]
        if wanted.json:
            wanted.print_json([_values(one) for one in known])
        else:
            stdout_console().print(page(known))


def there(wanted: Terms, folders: Iterable[Path]) -> list[local_models.Found]:
    """Return what is on this machine: embedded, in the home, in these folders, from the Hub."""
    found = local_models.of_kvd()
    for folder in (locate(wanted.home).root / "models", *folders):
        found += local_models.in_folder(folder.expanduser().absolute())
    by_path = {one.path.resolve(): one for one in reversed([*found, *local_models.in_hub_cache()])}
    return list(reversed(by_path.values()))


def _named(found: list[local_models.Found], status: DaemonStatus | None) -> list[Known]:
    by_source: dict[str, list[str]] = {}
    for model in status.models if status is not None else []:
        by_source.setdefault(model.source, []).append(model.name)
    return [Known(one, tuple(by_source.get(one.source, ()))) for one in found]


def _judged(one: Known, ask: Callable[[str], Forecast]) -> Known:
    if not one.found.complete:
        return one
    try:
        return replace(one, forecast=ask(_asked(one)))
    except NotRunning:
        raise
    except KvdError as error:
        return replace(one, error=error)


def _asked(one: Known) -> str:
    """Return what to ask for: the daemon may have another cache of the Hub than we."""
    if one.names:
        return one.names[0]
    return one.found.source if one.found.kind == "embedded" else str(one.found.path)


def _asking(client: Client, context: int) -> Callable[[str], Forecast]:
    return lambda model: client.explain(model, rows=1, context=context)


def _alone(wanted: Terms, context: int) -> Callable[[str], Forecast]:
    """Reckon as a daemon would that holds nothing yet."""
    from actors.machines.forecast import Question, forecast  # noqa: PLC0415 - without a daemon
    from actors.machines.governor import Governor  # noqa: PLC0415
    from actors.machines.ledger import Ledger  # noqa: PLC0415
    from actors.system import Settings  # noqa: PLC0415
    from kvd.config import config  # noqa: PLC0415
    from kvd.daemon.estimate import estimate, folder_of, machine  # noqa: PLC0415
    from kvd.host import memory  # noqa: PLC0415
    from protocol.types import KVSpec  # noqa: PLC0415

    settings = config.load(locate(wanted.home).config)
    budget = settings.budget_bytes or memory.default_budget(memory.reader().host())
    limits = Settings(max_rows=settings.max_rows, prefill_chunk=settings.chunk)
    ours = machine(settings.native, limits, settings.attention)

    def ask(source: str) -> Forecast:
        costs = estimate(folder_of(source), KVSpec(), ours)
        question = Question(source, costs.costs, costs.schemes, rows=1, context=context)
        return forecast(
            question,
            Governor(Ledger(budget)),
            0.0,
            source=source,
            state="not loaded",
            measured=False,
        )

    return ask


def page(known: list[Known]) -> Table:
    """Return them as a table."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("MODEL", style="bold", overflow="fold", min_width=24)
    table.add_column("WHERE", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("TAKES", justify="right", no_wrap=True)
    table.add_column("FITS", overflow="fold")
    loaded = any(one.names for one in known)
    if loaded:
        table.add_column("LOADED AS", overflow="fold")
    for one in known:
        forecast = one.forecast
        takes = format_bytes(forecast.levels[forecast.level].total_bytes) if forecast else ""
        table.add_row(
            Text(one.found.source),
            one.found.kind,
            format_bytes(one.found.weights_bytes) if one.found.weights_bytes else "",
            takes,
            _fits(one),
            *([Text(", ".join(one.names))] if loaded else []),
        )
    return table


def _fits(one: Known) -> Text:
    if not one.found.complete:
        missing = "not all of it is downloaded" if one.found.kind == "hub" else "has no weights"
        return Text(missing, "dim")
    if one.error is not None:
        return Text(one.error.message, "red")
    assert one.forecast is not None
    if one.forecast.verdict in _SAID:
        return Text(*_SAID[one.forecast.verdict])
    least, budget = one.forecast.levels[-1].total_bytes, one.forecast.budget_bytes
    return Text(f"never: {format_bytes(least)} of {format_bytes(budget)}", "red")


def _values(one: Known) -> dict[str, Any]:
    values: dict[str, Any] = {
        "source": one.found.source,
        "kind": one.found.kind,
        "path": str(one.found.path),
        "weights_bytes": one.found.weights_bytes,
        "complete": one.found.complete,
        "loaded_as": one.names,
    }
    if one.forecast is not None:
        values["forecast"] = one.forecast
    if one.error is not None:
        values["error"] = one.error.info()
    return values
