"""For all tests: a home with a path short enough for a socket, and hypothesis without a clock."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvd.home import Home

# A busy machine must not fail a test: what has to be fast is measured where that is the point.
settings.register_profile("kvd", deadline=None)
settings.load_profile("kvd")


@pytest.fixture
def home() -> Iterator[Home]:
    """A home that does not exist yet; pytest's own folders are too deep for a Unix socket."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield Home(root / "h")
    shutil.rmtree(root, ignore_errors=True)
