"""Which models lie on this machine: embedded ones, folders, and the Hugging Face hub's cache.

Looks at names and sizes of files only; what a model would take of the budget the daemon reckons.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import kvd

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["embedded", "folder", "hub"]
_EMBEDDED = ("demo",)
_CONFIG = "config.json"
_WEIGHTS = "*.safetensors"
_DEEPEST = 3
"""Folders below the one that is searched: ``models/owner/name`` is two."""


@dataclass(frozen=True)
class Found:
    """A model on the disk."""

    source: str
    """What `kvctl load` takes: a name, an absolute path or a Hub id."""
    kind: Kind
    path: Path
    weights_bytes: int
    """Of its safetensors files; 0: there are none, so it cannot be loaded."""
    complete: bool
    """Whether nothing of it is missing, as far as its files tell."""


def embedded() -> list[str]:
    """Return the names of models that come with kvd."""
    return list(_EMBEDDED)


def of_kvd() -> list[Found]:
    """Return the models that come with kvd."""
    root = Path(kvd.__file__).parent
    return [_found(name, "embedded", root / name) for name in _EMBEDDED]


def in_folder(folder: Path) -> list[Found]:
    """Return the models in a folder and in those below it, by path."""
    return [_found(str(path), "folder", path) for path in _model_folders(folder, _DEEPEST)]


def in_hub_cache() -> list[Found]:
    """Return the models in the Hub's cache, each as its newest snapshot, by name."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(hub_cache().iterdir()):
            kind, _, name = folder.name.partition("--")
            snapshot = _snapshot(folder) if kind == "models" else None
            if snapshot is not None and (snapshot / _CONFIG).is_file():
                found.append(_found(name.replace("--", "/"), "hub", snapshot))
    return found


def hub_cache() -> Path:
    """Return where the Hub's client keeps what it downloads, by its own variables."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or (
        Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot that a model's id stands for: that of ``main``, else the newest."""
    snapshots = folder / "snapshots"
    with contextlib.suppress(OSError):
        named = snapshots / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        if named.is_dir():
            return named
    with contextlib.suppress(OSError):
        return max(snapshots.iterdir(), key=lambda one: one.stat().st_mtime, default=None)
    return None


def _model_folders(folder: Path, deep: int) -> Iterator[Path]:
    if (folder / _CONFIG).is_file():
        yield folder
        return
    if deep == 0:
        return
    with contextlib.suppress(OSError):
        for one in sorted(folder.iterdir()):
            if one.is_dir() and not one.name.startswith("."):
                yield from _model_folders(one, deep - 1)


def _found(source: str, kind: Kind, path: Path) -> Found:
    size, broken = 0, False
    for file in path.glob(_WEIGHTS):
        try:
            size += file.stat().st_size
        except OSError:  # the cache's link to a blob that was not downloaded
            broken = True
    return Found(source, kind, path, size, complete=size > 0 and not broken)
