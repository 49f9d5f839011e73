"""`kvctl pull`: downloads a model of the Hugging Face Hub into the models folder."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvd.cli.common import CommonOptions, common_options, option, status_with
from kvd.cli.console import print_message, stderr_console
from kvd.cli.models import offline_forecast
from kvd.cli.pulled import Place, origin_of
from kvd.client import Client
from kvd.config import config
from kvd.config.models_dir import models_dir
from kvd.host.home import Home, locate
from kvd.host.units import format_bytes
from protocol import model_folder
from protocol.errors import (
    ConfigError,
    DownloadFailed,
    InsufficientMemory,
    InvalidModel,
    ModelError,
    ModelExists,
    NotRunning,
    UnknownModel,
)
from protocol.fields import ALIAS_PATTERN, ALIAS_RULE
from protocol.forecast import Forecast
from protocol.model_source import is_hub_id, short_name

if TYPE_CHECKING:
    from kvd.cli.hub import Hub, HubFile, HubModel

_AT_ONCE = 4
"""Files that are downloaded at once."""
_CONTEXT = 4096
"""Context of the request that must fit the budget."""
_HEADER_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000


@click.command()
@click.argument("model", metavar="HUB_ID", help="Such as mlx-community/Qwen3-0.6B-4bit.")
@option("--alias", "NAME", "The model's name (default: the id's last part).")
@option("--revision", "REVISION", "A branch, tag or commit.", default="main")
@click.option("--force", is_flag=True, help="Also if the model cannot fit the memory budget.")
@common_options()
def pull(
    common: CommonOptions, model: str, *, alias: str | None, revision: str, force: bool
) -> None:
    """Download a model of the Hub; requests then name it. An interrupted download continues."""
    with common.guarded():
        folder = pull_model(common, model, alias=alias, revision=revision, force=force)
        values = {"model": folder.name, "folder": str(folder)}
        common.print_outcome(values, "{} is in {}", folder.name, folder)


def pull_model(
    common: CommonOptions,
    hub_id: str,
    *,
    alias: str | None = None,
    revision: str = "main",
    force: bool = False,
) -> Path:
    """Return the model's folder, after it was downloaded if it was missing."""
    if not is_hub_id(hub_id):
        raise UnknownModel(
            f"{hub_id!r} is no id of the Hub; write owner/name, such as"
            " mlx-community/Qwen3-0.6B-4bit",
            source=hub_id,
        )
    place = Place(folder_of_models(common), alias or short_name(hub_id))
    if not re.search(ALIAS_PATTERN, place.name) or "/" in place.name or place.name[0] == ".":
        raise ConfigError(f"a model's folder {ALIAS_RULE}, without / and . at its start", key="")
    try:
        with place.locked(say_waiting):
            if _is_there(place, hub_id):
                return place.folder
            asyncio.run(_pull(common, place, hub_id, revision, force=force))
    except OSError as error:
        raise DownloadFailed(f"cannot write {place.folder}: {error.strerror}") from error
    announce(common, place.name)
    return place.folder


def folder_of_models(common: CommonOptions) -> Path:
    """Return the models folder of the daemon's home; raises `ConfigError` if there is none."""
    home = locate(common.home)
    try:
        with Client(home=common.home, socket=common.socket) as client:
            home = Home(Path(client.hello().home))
    except NotRunning:
        pass
    folder = models_dir(config.load(home.config), home.root).path
    if folder is None:
        raise ConfigError("models_dir is empty, so models have no folder; set it", key="models_dir")
    return folder


def announce(common: CommonOptions, name: str) -> None:
    """Make a running daemon look into the models folder for a name."""
    try:
        with Client(home=common.home, socket=common.socket) as client:
            status_with(client, name)
    except (NotRunning, ModelError):
        pass


def say_waiting() -> None:
    """Print why the lock of a model is not there at once."""
    print_message("[dim]another kvctl pulls or deletes this model; waiting for it[/]")


def _is_there(place: Place, hub_id: str) -> bool:
    if not place.folder.exists():
        return False
    origin = origin_of(place.folder)
    if origin is not None and origin.source == hub_id:
        print_message("[dim]{} is there already, revision {}[/]", place.name, origin.revision)
        return True
    other = f"of {origin.source}" if origin is not None else "that kvctl has not pulled"
    raise ModelExists(
        f"{place.folder} is a folder {other}; choose another name with --alias", model=place.name
    )


async def _pull(
    common: CommonOptions, place: Place, hub_id: str, revision: str, *, force: bool
) -> None:
    from kvd.cli.hub import connect  # noqa: PLC0415 - slow, and `kvctl --help` needs no network

    async with connect() as hub:
        model = await hub.model(hub_id, revision)
        place.staging.mkdir(exist_ok=True)
        place.check_disk(model)
        if not force:
            await _check_budget(common, hub, model, place)
        await _download(hub, model, place, shows=not common.json)
    place.finish(model)


async def _download(hub: Hub, model: HubModel, place: Place, *, shows: bool) -> None:
    console = stderr_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    places = asyncio.Semaphore(_AT_ONCE)
    with Progress(*columns, console=console, disable=not (shows and console.is_terminal)) as bar:
        task = bar.add_task(place.name, total=model.size)

        def advance(count: int) -> None:
            bar.advance(task, count)

        async def fetch(file: HubFile) -> None:
            if place.whole(file).exists():
                advance(file.size)
                return
            async with places:
                await hub.fetch(model, file, place.part(file), advance)
            place.part(file).rename(place.whole(file))

        unique = {file.checksum: file for file in model.files}
        advance(model.size - sum(file.size for file in unique.values()))
        await _all(fetch, list(unique.values()))


async def _all(work: Callable[[HubFile], Any], files: list[HubFile]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for file in files:
                group.create_task(work(file))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _check_budget(common: CommonOptions, hub: Hub, model: HubModel, place: Place) -> None:
    """Raise `InsufficientMemory` if the model could not run even alone.

    The forecast reads a copy of the folder whose weights have only their headers.
    """
    outline = place.staging / "outline"
    try:
        await _write_outline(hub, model, outline)
        found = await asyncio.to_thread(_forecast, common, outline)
    except InvalidModel as error:
        reason = error.message.replace(str(outline), model.id)
        print_message("[dim]its memory cannot be estimated: {}[/]", reason)
        return
    finally:
        shutil.rmtree(outline, ignore_errors=True)
    if found.verdict == "never":
        needs, budget = found.levels[-1].total_bytes, found.budget_bytes
        raise InsufficientMemory(
            f"{model.id} needs {format_bytes(needs)} and the budget is {format_bytes(budget)};"
            " raise the budget, choose a smaller model, or pull it anyway with --force"
        )


def _forecast(common: CommonOptions, folder: Path) -> Forecast:
    try:
        with Client(home=common.home, socket=common.socket) as client:
            return client.explain(str(folder), rows=1, context=_CONTEXT)
    except NotRunning:
        return offline_forecast(common, _CONTEXT)(str(folder))


async def _write_outline(hub: Hub, model: HubModel, folder: Path) -> None:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - at once
    for file in model.files:
        if "/" in file.name:
            continue
        path = folder / file.name
        data = b""
        if file.name == "config.json":
            data = await hub.read(model, file, 0, model_folder.MAX_CONFIG_BYTES)
        elif file.name.endswith(".safetensors"):
            data = await _header(hub, model, file)
        with path.open("wb") as stream:
            stream.write(data[: file.size])
            stream.truncate(file.size)  # sparse: takes no space


async def _header(hub: Hub, model: HubModel, file: HubFile) -> bytes:
    data = await hub.read(model, file, 0, _HEADER_BYTES)
    size = 8 + int.from_bytes(data[:8], "little")
    if len(data) < size <= min(file.size, _MAX_HEADER_BYTES):
        data += await hub.read(model, file, len(data), size - len(data))
    return data[:size]
