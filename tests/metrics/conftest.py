"""A fixture for `promtool`, Prometheus's own checker."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Promtool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def promtool() -> Promtool:
    """Return a function that runs `promtool` with these arguments, and this text as stdin."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")

    def run(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path, *map(str, arguments)],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
