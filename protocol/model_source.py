"""Names and sources of models, and the errors for those that do not exist.

A request names a model. A model is loaded from a source: an embedded name, a folder or a Hub id.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from protocol import paths
from protocol.errors import InvalidModel, UnknownModel, UnsupportedModel

EMBEDDED = ("demo",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MAX_LISTED = 8
_MAX_COMPARED = 256
"""Characters of a name beyond which no similar one is searched: the time grows with the square."""


def is_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None


def is_source(text: str) -> bool:
    """Return whether a model may be loaded from this text."""
    return text in EMBEDDED or text.startswith("/") or is_hub_id(text)


def short_name(source: str) -> str:
    """Return the name of a model that is loaded without an alias."""
    return source.rstrip("/").rpartition("/")[2] or source


def unknown_source(source: str) -> UnknownModel:
    """Return the error for a text that is no source."""
    advice = _did_you_mean(source, EMBEDDED) or (
        f"give {' or '.join(EMBEDDED)}, the absolute path of a folder, or a Hub id such as"
        " mlx-community/Qwen3-0.6B-4bit"
    )
    return UnknownModel(f"there is no model {source!r}; {advice}", source=source)


def unknown_model(name: str, loaded: Iterable[str], unloaded: Iterable[str]) -> UnknownModel:
    """Return the error for a request whose model is not known.

    ``unloaded``: known models that the next request loads.
    """
    loaded, unloaded = list(loaded), list(unloaded)
    lists = {"loaded": loaded, "loaded by the next request": unloaded}
    known = "; ".join(f"{title}: {_listed(names)}" for title, names in lists.items() if names)
    advice = _did_you_mean(name, [*loaded, *unloaded])
    if not advice and (name in EMBEDDED or is_hub_id(name)):
        advice = f"`kvctl load {name}` loads it as {short_name(name)}"
    return UnknownModel(
        f"there is no model {name!r} ({known or 'no model is known'});"
        f" {advice or '`kvctl load` adds a model'}",
        model=name,
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    found = _closest(name, known)
    return "" if found is None else f"did you mean {found!r}?"


def _closest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar name, without regard to case and to a path before the name."""
    if len(name) > _MAX_COMPARED:
        return None
    by_text: dict[str, str] = {}
    for one in known:
        by_text.setdefault(one.lower(), one)
        by_text.setdefault(short_name(one).lower(), one)
    for text in (name.lower(), short_name(name).lower()):
        if found := difflib.get_close_matches(text, by_text, n=1):
            return by_text[found[0]]
    return None


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(sorted(names)[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def check_folder(path: Path) -> Path:
    """Return the folder if it may have a model's files; raise a `ModelError` otherwise."""
    if not paths.exists(path):
        raise UnknownModel(f"there is no folder {path}", source=str(path))
    if path.suffix.lower() == ".gguf" or (paths.is_folder(path) and _has_gguf(path)):
        raise UnsupportedModel(
            f"{path} is in the GGUF format, which is not supported; use the original model in"
            " Hugging Face's layout (safetensors), which mlx_lm.convert quantizes",
            source=str(path),
        )
    if not paths.is_folder(path):
        raise InvalidModel(f"{path} is a file; give the model's folder", source=str(path))
    return path


def cached_snapshot(hub_id: str) -> Path | None:
    """Return the folder of a Hub model in the Hugging Face cache; None if there is none.

    Files may be missing in it.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME", caches / "huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs/main").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return snapshot if paths.is_folder(snapshot) else None


def _has_gguf(folder: Path) -> bool:
    if any(folder.glob("*.safetensors")):
        return False
    return any(folder.glob("*.gguf"))
