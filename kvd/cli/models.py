"""`kvctl models`: the models on this machine, their sizes, and whether they fit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rich_click as click
from rich.console import Group, RenderableType
from rich.text import Text

from kvd.cli import local_models, status_page
from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.console import print_message
from kvd.cli.local_models import LocalModel
from kvd.cli.options import Tokens
from kvd.cli.tables import fixed_column, headed, number_column, text_column
from kvd.client import Client
from kvd.config import config
from kvd.config.config import Config
from kvd.config.models_dir import models_dir
from kvd.config.sources import absolute
from kvd.host.home import Home, locate
from kvd.host.models_dir import ModelsDir
from kvd.host.units import format_bytes
from protocol.errors import KvdError, NotRunning
from protocol.forecast import Forecast
from protocol.types import DaemonStatus, ModelStatus

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
    """Names under which requests know it."""
    state: str = ""
    """State of its worker, or ``unloaded`` if a request would load it; empty: not known."""
    level: str = ""
    """KV schemes of a loaded model's pages."""
    forecast: Forecast | None = None
    error: KvdError | None = None
    """Why there is no forecast."""


@click.command(aliases=["list"])
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
    """Show the models that are known or on this machine: state, size, and whether they fit."""
    with common.guarded(), contextlib.ExitStack() as stack:
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
            forecast = offline_forecast(common, context)
        settings, root = _settings(common, status)
        found = local_models_in(folders, models_dir(settings, root))
        entries = {entry.name: absolute(entry.source, root) for entry in settings.entries}
        listed = _candidates(found, entries, status)
        candidates = [_with_forecast(one, forecast) for one in listed]
        common.print_data([_values(candidate) for candidate in candidates], page(candidates))


def _settings(common: CommonOptions, status: DaemonStatus | None) -> tuple[Config, Path]:
    """Return the configuration of the daemon's home, and the home."""
    home = locate(common.home) if status is None else Home(Path(status.home))
    return config.load(home.config), home.root


def local_models_in(folders: Iterable[Path], models: ModelsDir) -> list[LocalModel]:
    """Return the models of this machine, each once, by its path."""
    found = local_models.embedded() + local_models.in_models_dir(models)
    for folder in (*([models.path] if models.path is not None else ()), *folders):
        found += local_models.in_folder(folder.expanduser().absolute())
    found += local_models.in_hub_cache()
    by_path = {model.path.resolve(): model for model in reversed(found)}  # the first one wins
    return list(reversed(by_path.values()))


def _candidates(
    found: list[LocalModel], entries: Mapping[str, str], status: DaemonStatus | None
) -> list[Candidate]:
    """Return the models of this machine, then those that only the daemon or its file knows."""
    loaded = {model.name: model for model in status.models} if status is not None else {}
    known = {**entries, **{name: model.source for name, model in loaded.items()}}
    sources: dict[str, list[str]] = {}
    for name, source in known.items():
        sources.setdefault(source, []).append(name)
    listed = []
    for model in found:
        names = [*sources.pop(model.source, ()), *sources.pop(str(model.path), ())]
        if model.kind == "models_dir" and model.complete and model.source not in known:
            names.append(model.source)
        listed.append(_candidate(model, names, loaded))
    for source, names in sources.items():
        other = LocalModel(source, "config", Path(source), 0, complete=False)
        listed.append(_candidate(other, names, loaded))
    return listed


def _candidate(model: LocalModel, names: list[str], loaded: Mapping[str, ModelStatus]) -> Candidate:
    worker = next((loaded[name] for name in names if name in loaded), None)
    if worker is None:
        return Candidate(model, tuple(names), "unloaded" if names else "")
    level = status_page.levels(worker).plain
    return Candidate(model, tuple(names), worker.state, level)


def _with_forecast(candidate: Candidate, forecast: Callable[[str], Forecast]) -> Candidate:
    model = candidate.model
    if not model.complete and (model.kind != "config" or not candidate.level):
        return candidate
    try:
        return replace(candidate, forecast=forecast(_source(candidate)))
    except NotRunning:
        raise
    except KvdError as error:
        return replace(candidate, error=error)


def _source(candidate: Candidate) -> str:
    """Return a name or path for the daemon. Not a Hub id: the daemon's Hub cache may differ."""
    if candidate.level:
        return candidate.names[0]
    model = candidate.model
    return model.source if model.kind == "embedded" else str(model.path)


def offline_forecast(common: CommonOptions, context: int) -> Callable[[str], Forecast]:
    """Return a forecaster for a new daemon with this home's configuration and no loaded model."""
    from actors.machines.forecast import Question, forecast  # noqa: PLC0415 - without a daemon
    from actors.machines.governor import Governor  # noqa: PLC0415
    from actors.machines.ledger import Ledger  # noqa: PLC0415
    from actors.system import Settings  # noqa: PLC0415
    from kvd.daemon.estimate import estimate, folder_of, machine  # noqa: PLC0415
    from kvd.host import memory  # noqa: PLC0415
    from protocol.kv import KVSpec  # noqa: PLC0415

    settings = config.load(locate(common.home).config)
    budget = settings.budget_bytes or memory.default_budget(memory.reader().host())
    limits = Settings(
        max_rows=settings.max_rows,
        prefill_chunk=settings.chunk,
        attention_scratch=settings.attention_scratch(budget),
    )
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


def page(candidates: list[Candidate]) -> RenderableType:
    """Return a table of the models, and below it why some cannot be loaded."""
    columns = {
        "MODEL": text_column(style="bold", min_width=8),
        "NAMES": text_column(),
        "KIND": fixed_column(),
        "SIZE": number_column(),
        "STATE": fixed_column(),
        "LEVELS": fixed_column(),
        "NEEDS": number_column(),
        "FITS": text_column(),
    }
    rows = [_cells(candidate) for candidate in candidates]
    shown = [name for name in columns if any(str(row[name]) for row in rows)]
    for name in shown:
        columns[name].header = name
    table = headed(*(columns[name] for name in shown))
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    problems = [(one.model.source, problem) for one in candidates if (problem := _problem(one))]
    lines = [Text.assemble((name, "bold"), ": ", problem) for name, problem in problems]
    return Group(table, *([Text(), *lines] if lines else []))


def _problem(candidate: Candidate) -> str:
    """Return why a model cannot be loaded; empty: nothing is known against it."""
    if candidate.model.problem:
        return candidate.model.problem
    return candidate.error.message if candidate.error is not None else ""


def _cells(candidate: Candidate) -> dict[str, str | Text]:
    model, forecast = candidate.model, candidate.forecast
    names = ", ".join(name for name in candidate.names if name != model.source)
    needs = forecast.levels[forecast.level].total_bytes if forecast is not None else 0
    return {
        "MODEL": Text(model.source),
        "NAMES": Text(names),
        "KIND": "folder" if model.kind == "models_dir" else model.kind,
        "SIZE": format_bytes(model.weights_bytes) if model.weights_bytes else "",
        "STATE": candidate.state,
        "LEVELS": candidate.level,
        "NEEDS": format_bytes(needs) if needs else "",
        "FITS": _fits(candidate),
    }


def _fits(candidate: Candidate) -> Text:
    if _problem(candidate):
        return Text("no, see below", "red")
    if not candidate.model.complete and candidate.forecast is None and candidate.error is None:
        hub = candidate.model.kind == "hub"
        if candidate.model.kind == "config":
            return Text("")
        return Text("not completely downloaded" if hub else "has no weights", "dim")
    forecast = candidate.forecast
    assert forecast is not None
    if forecast.verdict in _VERDICTS:
        return Text(*_VERDICTS[forecast.verdict])
    least, budget = forecast.levels[-1].total_bytes, forecast.budget_bytes
    return Text(f"never: {format_bytes(least)} of {format_bytes(budget)}", "red")


def _values(candidate: Candidate) -> dict[str, Any]:
    values: dict[str, Any] = asdict(candidate.model)
    values |= {
        "path": str(candidate.model.path),
        "loaded_as": candidate.names if candidate.level else (),
    }
    values |= {"names": candidate.names, "state": candidate.state, "level": candidate.level}
    if candidate.forecast is not None:
        values["forecast"] = candidate.forecast
    if candidate.error is not None:
        values["error"] = candidate.error.info()
    return values
