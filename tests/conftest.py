"""Fixtures for all tests: a home with a path short enough for a socket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.home import Home


@pytest.fixture
def home() -> Iterator[Home]:
    """A home that does not exist yet; pytest's own folders are too deep for a Unix socket."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield Home(root / "h")
    shutil.rmtree(root, ignore_errors=True)
