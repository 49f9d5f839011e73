"""Model sources: makes folders absolute, because the daemon runs in another working folder."""

from __future__ import annotations

import os
from pathlib import Path

from protocol import paths

_PATH_STARTS = ("/", "./", "../", "~")


def absolute(text: str, base: Path | None = None) -> str:
    """Return a folder as an absolute path; names and Hub ids unchanged.

    A text is a folder if it starts with ``/``, ``./``, ``../`` or ``~``, or if it contains a slash
    and exists. So ``demo`` is always the embedded model.
    """
    path = (base or Path.cwd()) / os.path.expanduser(text)  # noqa: PTH111 - `~nobody` stays
    is_path = text in {".", ".."} or text.startswith(_PATH_STARTS)
    if is_path or ("/" in text and paths.is_folder(path)):
        return str(paths.resolved(path))
    return text
