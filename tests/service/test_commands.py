"""The commands of `kvctl service`, with a fake `launchctl` and a real daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import service
from kvd.config.config import Config
from kvd.doctor import running
from kvd.doctor.scene import Scene
from kvd.host.home import Home
from kvd.service import installer
from kvd.service.describe import Service, describe
from kvd.service.launchd import Launchd, label
from tests.process.helpers import Daemon, wait_for

pytestmark = pytest.mark.process


class Kvctl:
    """`kvctl service` on a machine with a fake launchd."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home, self._folder = home, folder
        self.manager = Launchd(describe(home, Config()), folder)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(service.service, [*arguments, "--home", str(self.home.root)])
        assert done.exit_code == status, done.output
        return done.output


@pytest.fixture
def kvctl(home: Home, tmp_path, monkeypatch) -> Iterator[Kvctl]:
    script = tmp_path / "bin" / "launchctl"
    script.parent.mkdir()
    fake = Path(__file__).with_name("launchctl.py")
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LAUNCHD", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "agents"

    def launchd(described: Service) -> Launchd:
        return Launchd(described, folder)

    monkeypatch.setattr(installer, "manager_of", launchd)
    home.create()
    home.config.write_text("http = {enabled = false}\n")
    command = Kvctl(home, folder)
    yield command
    installer.uninstall(command.manager)


def test_the_life_of_a_service(kvctl: Kvctl, home: Home):
    assert "not installed" in kvctl("status", status=3)
    assert "the service is not installed" in kvctl("start", status=1)
    assert "<key>ProgramArguments</key>" in kvctl("install", "--print")
    assert installer.installed(kvctl.manager) == []

    assert "running; starts with your session" in kvctl("install")
    state = json.loads(kvctl("status", "--json"))
    assert (state["state"], state["answers"], state["outdated"]) == ("running", True, [])
    assert (home.logs / "launchd.log").read_text() == ""  # the daemon writes to its own log
    assert "daemon started" in (home.logs / "kvd.log").read_text()

    home.config.write_text("http = {enabled = false}\nmax_rows = 3\n")
    assert "needs a restart: max_rows" in kvctl("reload")
    home.config.write_text("max_rows = -3\n")
    assert "max_rows" in kvctl("reload", status=5)  # refused before the daemon is signalled
    home.config.write_text("http = {enabled = false}\nmax_rows = 3\ndrain_timeout_s = 99.0\n")
    shown = kvctl("status")
    assert "the installed service files are outdated" in shown
    kvctl("install")
    again = json.loads(kvctl("status", "--json"))
    assert (again["outdated"], again["config_pending"]) == ([], [])
    assert again["pid"] != state["pid"]

    logs = kvctl("logs", "-n", "200")
    assert "reloading the configuration" in logs
    assert "daemon started" in kvctl("logs", "--json")
    assert kvctl("stop").startswith("stopped")
    assert "stopped" in kvctl("status", status=3)
    kvctl("uninstall")
    assert "the service was not installed" in kvctl("uninstall")


def test_the_log_shows_why_a_service_does_not_start(kvctl: Kvctl, home: Home, monkeypatch):
    monkeypatch.setattr(service, "_START_TIMEOUT_S", 0.5)
    (home.logs / "kvd.log").mkdir()
    assert "the daemon does not start" in kvctl("install", status=1)
    why = f"error: cannot use {home.logs / 'kvd.log'}"
    wait_for("the error in the log", lambda: why in kvctl("logs"))


def test_a_daemon_that_is_not_the_services_prevents_an_install(kvctl: Kvctl, home: Home):
    daemon = Daemon(home, "--fake").start()
    try:
        said = kvctl("install", status=4)
        assert f"a daemon that the service did not start (pid {daemon.pid})" in said
        assert installer.installed(kvctl.manager) == []
    finally:
        daemon.end()
    assert label(kvctl.manager.service).startswith("dev.kvd.kvd-")


def test_a_foreign_file_is_named_and_left_unchanged(kvctl: Kvctl, home: Home):
    (path,) = kvctl.manager.files()
    path.parent.mkdir()
    path.write_text("<plist/>")
    for command, status in (("status", 3), ("install", 1), ("uninstall", 1)):
        said = " ".join(kvctl(command, status=status).split())
        assert (
            "does not belong to this home's service: move it away, or install with --force" in said
        )
        assert "`kvctl doctor`" not in said
    found = running.service(Scene(home))
    assert (found.verdict, str(path) in found.observed) == ("warn", True)
    assert path.read_text() == "<plist/>"
    assert "running" in kvctl("install", "--force")
    assert json.loads(kvctl("status", "--json"))["files"] == [str(path)]


def test_paths_that_look_like_markup_are_shown_unchanged(kvctl: Kvctl, tmp_path, monkeypatch):
    folder, home = tmp_path / "[b]agents\\[0]", Home(tmp_path / "[dim]\\[h")
    monkeypatch.setattr(installer, "manager_of", lambda described: Launchd(described, folder))
    kvctl.home = home
    (path,) = Launchd(describe(home, Config()), folder).files()
    assert f"# {path}\n" in kvctl("install", "--print")
    assert str(home.root) in "".join(kvctl("status", status=3).split())
    folder.mkdir()
    path.write_text("<plist/>")
    assert f"{path} does not belong to this home's service" in kvctl("status", status=3)


NOWHERE = '[http]\nhost = "nowhere.invalid"\n'


def test_the_host_is_resolved_only_if_the_service_manager_listens_on_it(kvctl: Kvctl, home: Home):
    home.config.write_text(NOWHERE)
    kvctl("status", status=3)
    assert "nowhere.invalid" in kvctl("install", "--on-demand", status=5)
    kvctl("uninstall")


def test_a_service_with_a_host_that_no_longer_resolves_can_be_stopped(kvctl: Kvctl, home: Home):
    home.config.write_text("[http]\nport = 0\n")
    kvctl("install", "--on-demand")
    home.config.write_text(NOWHERE)
    state = json.loads(kvctl("status", "--json"))
    assert (state["state"], state["on_demand"]) == ("listening", True)
    assert "nowhere.invalid" in kvctl("start", status=5)
    kvctl("stop")
    kvctl("uninstall")
    assert "the service was not installed" in kvctl("uninstall")
