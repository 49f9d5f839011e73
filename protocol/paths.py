"""Examine paths that come from outside, without errors of the file system.

A path that cannot be examined counts as missing: a name that is too long, a folder without access,
a loop of links. `pathlib` raises some of these errors, and which ones depends on Python's version.
"""

from __future__ import annotations

import os
from pathlib import Path


def exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - see above


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def resolved(path: Path) -> Path:
    """Return the path without links, as far as they can be followed."""
    return Path(os.path.realpath(path))
