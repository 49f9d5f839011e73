"""The models folder: each of its folders is a model that requests may name by the folder's name.

Names and links are not trusted: a model is an entry of the folder itself and leads nowhere else.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from protocol import model_folder, paths
from protocol.errors import InvalidModel, KvdError
from protocol.fields import ALIAS_PATTERN
from protocol.model_source import check_folder


@dataclass(frozen=True)
class FolderModel:
    """A folder in the models folder."""

    name: str
    path: Path
    problem: str = ""
    """Why it cannot be loaded; empty: nothing is known against it."""


_SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change of a folder from which on a further change has a later time. Some file
systems count in seconds."""


@dataclass
class ModelsDir:
    """A folder of models; it may be missing."""

    path: Path | None
    _names: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _changed_ns: int | None = field(default=None, init=False, repr=False, compare=False)
    """When the folder had changed before it was listed; None: it must be listed again."""

    def find(self, name: str) -> Path | None:
        """Return the folder of a model, or None if there is no such folder.

        Raises a `ModelError` if the folder cannot be loaded. Reads no weights, and lists the
        models folder only after a change of it, so that it may run on an event loop.
        """
        if self.path is None or name not in self._known_names(self.path):
            return None
        if not paths.is_folder(self.path / name):
            return None
        _check(self.path, name, deep=False)
        return self.path / name

    def _known_names(self, path: Path) -> set[str]:
        try:
            changed_ns = path.stat().st_mtime_ns
        except (OSError, ValueError):
            return set()
        if changed_ns != self._changed_ns:
            settled = time.time_ns() - changed_ns > _SETTLED_NS
            self._changed_ns = changed_ns if settled else None
            self._names = _entries(path)
        return self._names

    def scan(self) -> list[FolderModel]:
        """Return all models by name, also those that cannot be loaded. Reads weights' headers."""
        if self.path is None:
            return []
        return [
            FolderModel(name, self.path / name, _problem(self.path, name))
            for name in sorted(_entries(self.path))
            if paths.is_folder(self.path / name)
        ]


def _entries(folder: Path) -> set[str]:
    """Return the names in a folder, without hidden ones and those that cannot be printed.

    File systems may find ``QWEN`` as ``Qwen``; the list has each model under one name.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return set()
    return {name for name in names if name.isprintable() and not name.startswith(".")}


def _problem(folder: Path, name: str) -> str:
    """Return why a model cannot be loaded; empty: nothing is known against it."""
    try:
        _check(folder, name, deep=True)
    except KvdError as error:
        return error.message
    return ""


def _check(folder: Path, name: str, *, deep: bool) -> None:
    """Raise a `ModelError` if a model cannot be loaded; ``deep``: as in `check_model`."""
    path = folder / name
    if not re.search(ALIAS_PATTERN, name):
        raise InvalidModel(
            f"{name!r} has characters that a model's name may not have; rename the folder"
        )
    if not paths.resolved(path).is_relative_to(paths.resolved(folder)):
        raise InvalidModel(
            f"{path} is a link out of its folder; list its target in config.toml instead"
        )
    check_model(path, deep=deep)


def check_model(path: Path, *, deep: bool = True) -> None:
    """Raise a `ModelError` if a load would refuse this folder; ``deep`` also reads headers."""
    check_folder(path)
    model_folder.check_files(path)
    files = model_folder.weight_files(path)
    config = model_folder.read_config(path)
    model_folder.check_index(path)
    if deep:
        model_folder.check_layers(path, config, model_folder.read_weights(files))
