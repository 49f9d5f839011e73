"""Imports between packages follow the layers, and the daemon never imports MLX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_import_linter_keeps_its_contracts():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("kvd.daemon.daemon, kvd.__main__", "mlx mlx_lm transformers numpy torch kvd.worker"),
        (
            "kvd.daemon.serve, kvd.daemon.daemon",
            "click rich_click prometheus_client kvd.cli kvd.client",
        ),
        ("kvd.client", "actors structlog click rich mlx kvd.worker kvd.daemon.daemon"),
        ("protocol.messages, protocol.session, protocol.worker", "kvd actors asyncio"),
        ("actors.system", "kvd structlog mlx"),
    ],
)
def test_an_import_does_not_load_forbidden_modules(modules, forbidden):
    code = (
        f"import sys, {modules}\n"
        f"found = set({forbidden!r}.split()) & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(found)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
