"""One daemon with real models, and one browser, for all tests of the page."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.client import Client
from kvd.host.home import Home
from tests.http.live import Live, stopped
from tests.page.chromium import PROGRAM, Page, browser
from tests.process.helpers import wait_for, write_config

LONG = "a-folder-of-an-organisation/a-model-with-a-long-name-0.6B-instruct-2511-mlx-4bit"
AXE = Path(sys.prefix) / "clients/node_modules/axe-core/axe.min.js"
CONFIG = f"""
budget = "600MiB"
[http]
port = %d
[[models]]
source = "demo"
[[models]]
source = "demo"
alias = "writer"
load = "demand"
[[models]]
source = "demo"
alias = "{LONG}"
load = "demand"
"""


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def daemon() -> Iterator[Live]:
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    # The port stays the same after a restart.
    it = Live(write_config(Home(root / "h"), CONFIG % free_port()))
    with stopped(it):
        it.start()
        wait_for("demo", lambda: it.model("demo").state == "ready", 90)
        yield it
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with browser() as page:
        page.resize(1280)
        page.scheme("light")
        yield page


@dataclass
class Visit:
    """The page of the daemon, in the browser."""

    page: Page
    daemon: Live
    url: str
    caused: list[str] = field(default_factory=list)

    def open(self, view: str = "overview") -> Page:
        self.page.open("about:blank")
        self.page.open(f"{self.url}/#{view}")
        self.page.wait("!document.querySelector('#views').hidden")
        return self.page

    def check(self) -> None:
        """Leave the page and check its problems: those that the test caused, and no others."""
        self.page.open("about:blank")  # receives what the browser has reported
        for text in self.caused:
            assert any(text in one for one in self.page.problems), f"expected {text!r}"
        others = [one for one in self.page.problems if not any(t in one for t in self.caused)]
        assert others == []
        assert {one for one in self.page.requested if not one.startswith(self.url)} <= {
            "about:blank"
        }


@pytest.fixture
def visit(tab: Page, daemon: Live) -> Iterator[Visit]:
    """Fails the test if the page logged an error, broke its policy, or asked another server."""
    tab.problems.clear()
    tab.requested.clear()
    visit = Visit(tab, daemon, daemon.url)
    yield visit
    visit.check()


def press(daemon: Live, spare_bytes: int, tokens: int) -> list[threading.Thread]:
    """Lower the budget to the models' base and some bytes, and start requests that need more."""
    with daemon.client() as kvd:
        for name in ("demo", "writer"):
            kvd.load("demo", alias=name).result  # noqa: B018 - waits
        while not all(model.stats.reclaimable.base for model in kvd.status().models):
            time.sleep(0.05)
        bases = sum(model.stats.reclaimable.base for model in kvd.status().models)
        kvd.configure(budget_bytes=bases + spare_bytes)

    def run(number: int) -> None:
        prompt = "a word and a file " * (150 + 40 * number)
        with Client(home=daemon.home.root) as kvd:
            model = ("demo", "writer")[number % 2]
            list(kvd.generate(model, prompt, max_tokens=tokens, ignore_eos=True))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    return threads
