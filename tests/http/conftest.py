"""Fixtures: real daemons that answer HTTP, with the fake engine or the embedded model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvd.host.home import Home
from tests.http.live import Live, stopped
from tests.process.helpers import source, wait_for, write_config

CONFIG = """
max_rows = 64
[http]
port = 0
[[models]]
source = "fake:tps=500"
alias = "on-demand"
load = "demand"
[[models]]
source = "fake:load_error=invalid_model"
alias = "broken"
load = "demand"
"""


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """A daemon on the fake engine with the models `fast`, `slow` and `flood`, for all tests."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    daemon = Live(write_config(Home(root / "h"), CONFIG), "--fake")
    with stopped(daemon):
        daemon.start()
        daemon.load(source(tps=1000), "fast")
        daemon.load(source(tps=20), "slow")
        daemon.load(source(tps=0), "flood")
        yield daemon
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def live_alone(home: Home) -> Iterator[Live]:
    """A separate daemon for one test, with the model `slow`."""
    daemon = Live(write_config(home, CONFIG), "--fake")
    with stopped(daemon):
        daemon.start()
        daemon.load(source(tps=20), "slow")
        yield daemon


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    """HTTP over the Unix socket."""
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(live.home.http_socket)),
        base_url="http://kvd",
        timeout=30,
    ) as it:
        yield it


@pytest.fixture(scope="session")
def demo() -> Iterator[Live]:
    """A daemon that serves the embedded model."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    daemon = Live(write_config(Home(root / "h"), "[http]\nport = 0\n"))
    with stopped(daemon):
        daemon.start("--model", "demo")
        wait_for("demo is loaded", lambda: httpx.get(f"{daemon.url}/readyz").status_code == 200, 90)
        yield daemon
    shutil.rmtree(root, ignore_errors=True)
