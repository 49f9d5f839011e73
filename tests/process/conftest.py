"""Fixtures: real daemons with the fake engine, for one test or for a module."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.host.home import Home
from tests.process.helpers import Daemon, source


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.process)


@pytest.fixture
def make_daemon(home: Home) -> Iterator[Callable[..., Daemon]]:
    """Make daemons with the test's home; they end with the test."""
    made: list[Daemon] = []

    def make(*arguments: str) -> Daemon:
        made.append(Daemon(home, "--fake", *arguments))
        return made[-1]

    yield make
    for daemon in made:
        daemon.end()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon for one test."""
    return make_daemon().start()


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon with the model `fast` for all tests of a module; they leave it unchanged."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    daemon = Daemon(Home(root / "h"), "--fake")
    try:
        daemon.start()
        daemon.load(source(tps=1000), "fast")
        yield daemon
    finally:
        daemon.end()
        shutil.rmtree(root, ignore_errors=True)
