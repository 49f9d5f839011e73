"""What people write for a model, and what the daemon gets: it runs in another folder."""

from __future__ import annotations

import os
from pathlib import Path

_PATH_STARTS = ("/", "./", "../", "~")


def absolute(text: str, base: Path | None = None) -> str:
    """Return a folder as an absolute path; names and Hub ids as they are.

    A folder is what starts like one (``/``, ``./``, ``../``, ``~``), or what holds a slash and is
    there. So ``demo`` is always the embedded model, and ``org/name`` a Hub id unless it exists.
    """
    path = (base or Path.cwd()) / os.path.expanduser(text)  # noqa: PTH111 - `~nobody` stays
    is_path = text in {".", ".."} or text.startswith(_PATH_STARTS)
    if is_path or ("/" in text and path.is_dir()):
        return str(path.resolve())
    return text
