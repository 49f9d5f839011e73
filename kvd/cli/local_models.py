"""Models on this machine: embedded ones, folders, and the Hugging Face cache.

Reads only names and sizes of files. The memory that a model would need is estimated elsewhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import kvd
from kvd.host.models_dir import ModelsDir
from protocol.model_source import EMBEDDED

Kind = Literal["embedded", "models_dir", "folder", "hub", "config"]
_CONFIG = "config.json"
_WEIGHTS = "*.safetensors"
STAGING = ".pull-"
"""Beginning of a folder's name in the models folder until its download is complete."""
_HALF = "its download is not complete; `kvctl pull` continues it, `kvctl rm` deletes it"
_MAX_DEPTH = 3
"""Levels of folders below the searched one; ``models/owner/name`` is two."""


@dataclass(frozen=True)
class LocalModel:
    """A model on disk."""

    source: str
    """What `kvctl load` takes: a name, an absolute path or a Hub id."""
    kind: Kind
    path: Path
    weights_bytes: int
    """Size of its safetensors files; 0 if it has none and cannot be loaded."""
    complete: bool
    """Whether it has weights, and all of its files are downloaded."""
    problem: str = ""
    """Why a folder of the models folder cannot be loaded."""


def embedded() -> list[LocalModel]:
    root = Path(kvd.__file__).parent
    return [_model(name, "embedded", root / name) for name in EMBEDDED]


def in_models_dir(folder: ModelsDir) -> list[LocalModel]:
    """Return the models of the models folder by name, also those that cannot be loaded."""
    found = []
    for one in folder.scan():
        model = _model(one.name, "models_dir", one.path)
        complete = model.complete and not one.problem
        found.append(replace(model, complete=complete, problem=one.problem))
    for path in sorted(folder.path.glob(f"{STAGING}*")) if folder.path is not None else ():
        size = _size_of_files(path)
        name = path.name.removeprefix(STAGING)
        found.append(LocalModel(name, "models_dir", path, size, complete=False, problem=_HALF))
    return found


def _size_of_files(folder: Path) -> int:
    size = 0
    with contextlib.suppress(OSError):  # the download has just ended
        for file in folder.iterdir():
            if file.is_file():
                with contextlib.suppress(FileNotFoundError):  # it has just got another name
                    size += file.stat().st_size
    return size


def in_folder(folder: Path) -> list[LocalModel]:
    """Return the models in a folder and its subfolders, ordered by path."""
    return [_model(str(path), "folder", path) for path in _model_folders(folder, _MAX_DEPTH)]


def in_hub_cache() -> list[LocalModel]:
    """Return the models in the Hub's cache by name, each with its ``main`` or newest snapshot."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(hub_cache().iterdir()):
            kind, _, name = folder.name.partition("--")
            snapshot = _snapshot(folder) if kind == "models" else None
            if snapshot is not None and (snapshot / _CONFIG).is_file():
                found.append(_model(name.replace("--", "/"), "hub", snapshot))
    return found


def hub_cache() -> Path:
    """Return the folder of downloads, by the environment variables of the Hub's client."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or (
        Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of ``main``, or the newest snapshot if there is no ``main``."""
    snapshots = folder / "snapshots"
    with contextlib.suppress(OSError):
        named = snapshots / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        if named.is_dir():
            return named
    with contextlib.suppress(OSError):
        return max(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, default=None)
    return None


def _model_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / _CONFIG).is_file():
        yield folder
        return
    if depth == 0:
        return
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name.isprintable() and not path.name.startswith("."):
                yield from _model_folders(path, depth - 1)


def _model(source: str, kind: Kind, path: Path) -> LocalModel:
    size, broken = 0, False
    for file in path.glob(_WEIGHTS):
        try:
            size += file.stat().st_size
        except OSError:  # the cache's link to a file that was not downloaded
            broken = True
    return LocalModel(source, kind, path, size, complete=size > 0 and not broken)
