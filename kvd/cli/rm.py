"""`kvctl rm`: deletes a model from the models folder or from the Hugging Face cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rich_click as click

from kvd.cli import local_models
from kvd.cli.common import CommonOptions, common_options
from kvd.cli.console import print_message
from kvd.cli.pull import folder_of_models, say_waiting
from kvd.cli.pulled import Place
from kvd.client import Client
from kvd.host.models_dir import ModelsDir
from kvd.host.units import format_bytes
from protocol import paths
from protocol.errors import ConfigError, InvalidRequest, KvdError, NotRunning, UnknownModel
from protocol.model_source import is_hub_id


@dataclass(frozen=True)
class Stored:
    """A model's folders on disk, which are deleted together."""

    name: str
    folders: tuple[Path, ...]
    sources: frozenset[str]
    """Sources under which a daemon may have loaded it."""
    place: Place | None = None
    """Its place in the models folder; None: it is in the cache."""

    @property
    def size(self) -> int:
        """Bytes of the files; links count as nothing."""
        found = (path.lstat() for folder in self.folders for path in _files(folder))
        return sum(one.st_size for one in found)


@click.command()
@click.argument("model", help="A name of the models folder, or the id of a model in the cache.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@common_options()
def rm(common: CommonOptions, model: str, *, yes: bool) -> None:
    """Delete a model from disk: of the models folder, or of the Hugging Face cache."""
    with common.guarded():
        stored = find(common, model)
        _check_unused(common, stored)
        size = stored.size
        if not yes:
            _confirm(stored, size)
        try:
            with contextlib.ExitStack() as stack:
                if stored.place is not None:
                    stack.enter_context(stored.place.locked(say_waiting))
                _delete(common, stored)
        except OSError as error:
            raise InvalidRequest(
                f"cannot delete {error.filename}: {error.strerror}", field="model"
            ) from error
        values = {"model": model, "folders": [str(one) for one in stored.folders], "bytes": size}
        common.print_outcome(values, "{} deleted, {} freed", model, format_bytes(size))


def find(common: CommonOptions, name: str) -> Stored:
    """Return a model's folders; raises `UnknownModel` for a name that is in neither place."""
    try:
        models = folder_of_models(common)
    except ConfigError:
        models = None
    if models is not None and "/" not in name and name[:1] not in {"", "."}:
        place = Place(models, name)
        known = {one.name for one in ModelsDir(models).scan()}
        check = _is_model if name in known else _is_left
        folders = [place.folder] if check(place.folder) else []
        folders += [place.staging] if _is_left(place.staging) else []
        if folders:
            real = str(paths.resolved(place.folder))
            return Stored(name, tuple(folders), frozenset({str(place.folder), real}), place)
    if is_hub_id(name):
        folder = local_models.hub_cache() / f"models--{name.replace('/', '--')}"
        if _is_left(folder):
            inside = {str(one) for one in folder.glob("snapshots/*")}
            return Stored(name, (folder,), frozenset({name, *inside}))
    raise UnknownModel(
        f"there is no model {name!r} in {models or 'a models folder'} and in"
        f" {local_models.hub_cache()}; `kvctl list` shows them all, and other folders are yours"
        " to delete",
        model=name,
    )


def _is_model(folder: Path) -> bool:
    """Return whether a folder is a model, complete or not, or a link.

    What else is in the models folder is no business of kvd, such as a folder of many models.
    """
    names = ("config.json", "*.safetensors")
    return folder.is_symlink() or any(True for name in names for _ in folder.glob(name))


def _hidden(folder: Path) -> Path:
    """Return the name of a folder while it is deleted; it remains if the process is killed."""
    return folder.with_name(f".rm-{folder.name.lstrip('.')}")


def _is_left(folder: Path) -> bool:
    """Return whether a folder exists, or a part of it after a deletion that was killed."""
    return paths.is_folder(folder) or paths.is_folder(_hidden(folder))


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_symlink():
        return
    for root, _, names in os.walk(folder):
        yield from (Path(root) / name for name in names)


def _check_unused(common: CommonOptions, stored: Stored) -> None:
    try:
        with Client(home=common.home, socket=common.socket) as client:
            models = client.status().models
    except NotRunning:
        return
    for model in models:
        if model.source in stored.sources or str(paths.resolved(Path(model.source))) in (
            stored.sources
        ):
            raise InvalidRequest(
                f"{stored.name} is loaded as {model.name}; `kvctl stop {model.name}` first",
                field="model",
            )


def _confirm(stored: Stored, size: int) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest(f"deleting {stored.name} needs --yes without a terminal", field="yes")
    print_message("{}", "\n".join(str(one) for one in stored.folders))
    click.confirm(f"Delete {stored.name} ({format_bytes(size)})?", abort=True, err=True)


def _delete(common: CommonOptions, stored: Stored) -> None:
    """Hide the folders by a rename, so that no load finds half of one, and delete them."""
    for folder in stored.folders:
        if folder.is_symlink():
            folder.unlink()
            continue
        hidden = _hidden(folder)
        if paths.exists(hidden):
            shutil.rmtree(hidden)
        if not paths.exists(folder):
            continue
        folder.rename(hidden)
        try:
            _check_unused(common, stored)
        except KvdError:
            hidden.rename(folder)  # a request has loaded it in the meantime
            raise
        shutil.rmtree(hidden)
    try:
        with Client(home=common.home, socket=common.socket) as client:
            client.unload(stored.name)  # the daemon forgets a model without a folder
    except KvdError:
        pass
