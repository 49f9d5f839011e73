"""`kvctl service logs` under systemd, with a journal, with an empty one and without one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config.config import Config
from kvd.host.home import Home
from kvd.service.describe import describe
from kvd.service.systemd import Systemd
from tests.process.helpers import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has systemd"),
]

JOURNALS = {
    # An empty journal is followed without any output.
    "empty": 'case "$*" in *--follow*) exec sleep 600 ;; esac',
    "none": "echo 'No journal files were found.' >&2; exit 1",
    "full": 'echo "from the journal"; case "$*" in *--follow*) exec sleep 600 ;; esac',
}


@pytest.fixture
def kvctl(home: Home, tmp_path):
    """Return a function that starts `kvctl service logs` on a machine with a given journal."""
    home.create()
    home.logs.mkdir(exist_ok=True)
    for path, content in (
        Systemd(describe(home, Config()), tmp_path / "systemd/user").files().items()
    ):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "sleep", "tail"):
        (programs / name).symlink_to(str(shutil.which(name)))
    started: list[subprocess.Popen[bytes]] = []

    def start(journal: str | None, *arguments: str) -> Path:
        """Return the file of its output. ``journal``: of `JOURNALS`; None: no `journalctl`."""
        if journal is not None:
            script = programs / "journalctl"
            script.write_text(f"#!/bin/sh\n{JOURNALS[journal]}\n")
            script.chmod(0o755)
        command = [sys.executable, "-m", "kvd.cli", "service", "logs", *arguments]
        output = tmp_path / "output"
        with output.open("wb") as out:
            started.append(
                subprocess.Popen(
                    [*command, "--home", str(home.root)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PATH": str(programs), "XDG_CONFIG_HOME": str(tmp_path)},
                    start_new_session=True,
                )
            )
        return output

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)


@pytest.mark.parametrize("journal", ["empty", "none", None])
def test_without_a_journal_the_daemons_own_log_is_followed(kvctl, journal, home: Home):
    log = home.logs / "kvd.log"
    log.write_text("long ago\nbefore\n")
    output = kvctl(journal, "-f", "-n", "1")
    wait_for("the last line", lambda: "before\n" in output.read_text())
    log.rename(log.with_suffix(".1"))
    log.write_text("after a rotation\n")
    wait_for("the new line", lambda: "after a rotation\n" in output.read_text())
    assert "long ago" not in output.read_text()


def test_a_journal_with_lines_is_shown(kvctl, home: Home):
    (home.logs / "kvd.log").write_text("from the log\n")
    output = kvctl("full", "-f")
    wait_for("the lines of the journal", output.read_text)
    assert output.read_text() == "from the journal\n"
