"""Advice that kvctl adds to the daemon's errors, because it knows the user's working folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import KvdError, UnknownModel, UnknownOp, UnsupportedVersion

_PATH_STARTS = ("/", "./", "../", "~")


def hints(error: KvdError) -> Iterator[str]:
    if "retry_after_s" in error.detail:
        yield f"try again in {error.detail['retry_after_s']} s"
    if isinstance(error, UnknownOp | UnsupportedVersion):
        yield "the daemon's version differs from kvctl's; restart the daemon"
    if isinstance(error, UnknownModel):
        source = error.detail.get("source")
        name = error.detail.get("model") or source
        if isinstance(name, str) and not re.search("no folder|did you mean", error.message):
            yield from _for_path(name, is_path=name == source or name.startswith(_PATH_STARTS))


def _for_path(name: str, *, is_path: bool) -> Iterator[str]:
    try:
        path = Path(name).expanduser().resolve()
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, `~nobody`, NUL
        return
    if is_folder:
        source = name if "/" in name else f"./{name}"
        yield f"it is a folder: `kvctl load {source}` loads it as {path.name}"
    elif is_path and "/" in name:
        yield f"there is no folder {name}"
