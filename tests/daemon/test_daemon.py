"""Parts of `Daemon` without starting it: model sources, option precedence, and the welcome text.

Tests that start a daemon are in tests/process.
"""

from __future__ import annotations

import os

from structlog.testing import capture_logs

import kvd.daemon.daemon
from actors.ports import Notice
from kvd.config.config import Config, parse
from kvd.config.http import HttpSettings
from kvd.config.options import Options
from kvd.daemon.daemon import Daemon, ModelToLoad, _notify
from kvd.daemon.welcome import welcome
from kvd.host.home import Home
from kvd.http.listeners import open_listeners
from kvd.http.server import Server
from protocol.kv import KVSpec
from protocol.types import Problem
from tests.cli.stub import MODEL


def daemon(home: Home, settings: Config, **options) -> Daemon:
    return Daemon(Options(home, fake=True, **options), settings)


def test_models_of_the_configuration_are_relative_to_the_home(home: Home, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    text = (
        'models = ["demo", "org/name", "~/x", "./y", {source = "../z", alias = "z", kv = "k8v4"}]'
    )
    assert daemon(home, parse(text))._models_to_load() == [
        ModelToLoad("demo"),
        ModelToLoad("org/name"),
        ModelToLoad("/home/someone/x"),
        ModelToLoad(str(home.root / "y")),
        ModelToLoad(str(home.root.parent / "z"), alias="z"),
    ]


def test_notices_may_have_fields_of_any_name():
    fields = {"level": 2, "event": "x", "exc_info": "y", "model": "demo"}
    with capture_logs() as logs:
        _notify(Notice("governor_start_level", "warning", fields))
    (said,) = logs
    assert (said["event"], said["log_level"]) == ("governor_start_level", "warning")
    assert (said["its_level"], said["its_event"], said["model"]) == (2, "x", "demo")


def test_models_of_the_command_line_are_relative_to_the_working_directory(
    home: Home, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    entries = daemon(home, Config(models=["other"]), models=("./y",))._models_to_load()
    assert entries == [ModelToLoad(str(tmp_path / "y"))]
    dense = daemon(home, Config(models=["other"]), models=("demo",), kv=KVSpec(16, 16))
    assert dense._models_to_load() == [ModelToLoad("demo", kv=KVSpec(16, 16))]


def test_the_command_lines_budget_overrides_the_configurations(home: Home):
    settings = Config(budget="2GiB")
    assert daemon(home, settings, budget_bytes=2**30)._budget == 2**30
    assert daemon(home, settings)._budget == 2**31


def test_the_command_lines_attention_overrides_the_configurations(home: Home, monkeypatch):
    said = []
    monkeypatch.setattr(
        kvd.daemon.daemon, "Spawner", lambda **options: said.append(options["attention"])
    )
    for settings, options in (
        (Config(), {}),
        (Config(attention="reference"), {}),
        (Config(attention="reference"), {"attention": "auto"}),
        (Config(), {"attention": "reference"}),
    ):
        daemon(home, settings, **options)

    assert said == ["auto", "reference", "auto", "reference"]


async def test_keys_that_are_set_while_http_starts_are_required(home: Home, monkeypatch):
    home.create()
    (listener,) = open_listeners(home, HttpSettings(tcp=False)).listeners
    one = Daemon(Options(home, fake=True), Config(), listeners=[listener])
    early, late = ({name: "sha256:" + "0" * 64} for name in ("early", "late"))
    started = Server.start

    async def meanwhile(server: Server) -> None:
        assert server._guard.settings.keys == early
        await one._system.configuration.change({"http.keys": late})
        await started(server)

    monkeypatch.setattr(Server, "start", meanwhile)
    await one._system.configuration.change({"http.keys": early})
    await one._serve_http(starting=lambda: False)
    assert one._http is not None
    assert one._http._guard.settings.keys == late
    await one._http.close()
    listener.close()


def test_the_welcome_suggests_a_loaded_model_or_else_a_load(home: Home):
    text = welcome(home, [MODEL], [])
    assert "serves demo (k8v8)" in text
    assert "generate demo" in text
    assert "failed" not in text
    assert "load demo" in welcome(home, [], [])


def test_the_welcome_names_failed_models_and_suggests_no_commands_for_them(home: Home):
    text = welcome(home, [], [("demo", "it does not fit")])
    assert "failed  demo: it does not fit" in text
    assert "status" in text
    assert "generate" not in text
    assert "load demo" not in text
    text = welcome(home, [MODEL], [("big", "it does not fit")])
    assert "failed  big: it does not fit" in text
    assert "generate demo" in text


PORT = Problem("http.port", "no HTTP on 127.0.0.1 port 11711", "choose another port")


def test_problems_of_the_start_and_of_the_budget_are_logged_and_in_the_status(home: Home):
    one = Daemon(Options(home, fake=True), Config(budget="900TiB"), problems=[PORT])
    with capture_logs() as logs:
        one._log_problems()
    (port, budget) = one._system.problems()
    assert port == PORT
    assert (budget.key, "budget of 900.0 TiB is more than" in budget.observed) == ("budget", True)
    logged = [(line["log_level"], line["key"], line["event"], line["advice"]) for line in logs]
    assert logged == [("warning", it.key, it.observed, it.advice) for it in (port, budget)]
    within = Daemon(Options(home, fake=True), Config(budget="64MiB"))
    assert within._system.problems() == []


def test_the_welcome_has_the_address_of_the_web_page(home: Home):
    http = ["http://127.0.0.1:11711", f"unix:{home.http_socket}"]
    line = "page    http://127.0.0.1:11711/"
    assert line in welcome(home, [MODEL], [], http, page=True).splitlines()
    assert line not in welcome(home, [MODEL], [], http).splitlines()


def test_the_welcome_warns_of_problems_and_how_to_solve_them(home: Home):
    lines = welcome(home, [MODEL], [], [f"unix:{home.http_socket}"], [PORT]).splitlines()
    at = lines.index("WARNING no HTTP on 127.0.0.1 port 11711")
    assert lines[at + 1].strip() == "choose another port"


def test_options_of_the_command_line_are_unpacked_as_they_were_packed(tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xe9 \xff")  # file names need not be UTF-8
    said = Options(Home(root), 5, ("demo", "/ä"), KVSpec(8, 4, floors={-1: "k8v8"}), "reference")
    assert Options.unpacked(said.packed()) == said
