"""`Reloader`: which changes of the configuration take effect now, later, or not at all."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest

from actors.status import KnownModel
from kvd import demo
from kvd.config.config import parse
from kvd.config.options import Options
from kvd.config.reload import Reloader, known_models
from kvd.host.home import Home
from protocol.errors import ConfigError
from protocol.kv import KVSpec
from protocol.policy import ModelPolicy
from protocol.settings import Changed

DEFAULT = 7 * 2**30


class Running:
    """A system that applies every change, except changes of loaded models."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.loaded: set[str] = set()

    def limit_prefix_store(self, limits):
        self.limits = limits

    async def set_budget(self, total_bytes):
        self.said.append(("budget", total_bytes))

    async def add_configured_model(self, name, known, policy):
        self.said.append(("list", name, known, policy))
        return name not in self.loaded

    async def set_found_models(self, sources):
        self.found = sources

    async def remove_configured_model(self, name):
        self.said.append(("unlist", name))


class Reloading:
    def __init__(self, home: Home, text: str = "", **options: Any) -> None:
        self.running = Running()
        self.started_loads: list[str] = []
        self.reloader = Reloader(
            Options(home, **options),
            parse(text),
            self.running,
            default_budget=lambda: DEFAULT,
            load=lambda entry: self.started_loads.append(entry.source),
        )

    async def take(self, text: str) -> list[Changed]:
        async with self.reloader.lock:
            return await self.reloader.apply(parse(text))


@pytest.fixture(autouse=True)
def level():
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def test_an_equal_configuration_changes_nothing(home: Home):
    text = 'budget = "1GiB"\nmodels = ["demo", {source = "x", kv = "k8v4"}]'
    it = Reloading(home, text)
    assert await it.take(text) == []
    assert await it.take(text.replace('"k8v4"', '{scheme = "k8v4"}')) == []
    assert (it.running.said, it.started_loads) == ([], [])


async def test_a_budget_takes_effect_at_once_and_without_one_the_default_does(home: Home):
    it = Reloading(home)
    assert await it.take('budget = "1GiB"') == [Changed("budget", None, "1GiB")]
    assert await it.take("") == [Changed("budget", "1GiB", None)]
    assert it.running.said == [("budget", 2**30), ("budget", DEFAULT)]


async def test_the_command_line_overrides_a_reloaded_file(home: Home):
    it = Reloading(home, budget_bytes=2**30, attention="auto")
    changes = await it.take('budget = "2GiB"\nattention = "reference"')
    assert [(one.key, one.takes_effect) for one in changes] == [
        ("budget", "command_line"),
        ("attention", "command_line"),
    ]
    assert it.running.said == []
    assert it.reloader.pending == ()


async def test_the_log_level_takes_effect_at_once(home: Home):
    await Reloading(home).take('log_level = "error"')
    assert logging.getLogger().level == logging.ERROR


async def test_a_change_that_needs_a_restart_stays_pending_until_it_is_reverted(home: Home):
    it = Reloading(home)
    wanted = "max_rows = 4\ndrain_timeout_s = 5.0"
    for _ in range(2):  # a second reload reports it again
        assert Changed("max_rows", 32, 4, "start") in await it.take(wanted)
        assert it.reloader.pending == ("max_rows",)
    assert it.reloader.settings.max_rows == 32
    assert it.reloader.settings.drain_timeout_s == 5.0
    await it.take("drain_timeout_s = 5.0")
    assert it.reloader.pending == ()


async def test_only_changed_fields_of_a_model_are_applied(home: Home):
    it = Reloading(home, 'models = [{source = "demo", priority = 1}]')
    changes = await it.take('models = [{source = "demo", priority = 2}]')
    assert changes == [Changed("models[demo].priority", 1, 2)]
    known = KnownModel("demo", KVSpec(), ModelPolicy(priority=2), listed=True)
    assert it.running.said == [("list", "demo", known, {"priority": 2})]
    assert it.started_loads == []


async def test_added_models_are_loaded_and_removed_ones_become_unlisted(home: Home):
    it = Reloading(home, 'models = ["old"]')
    changes = await it.take('models = ["a", {source = "b", load = "demand"}]')
    assert changes == [
        Changed("models[a]", None, "a"),
        Changed("models[b]", None, "b"),
        Changed("models[old]", "old", None),
    ]
    assert it.started_loads == ["a"]
    assert it.running.said[-1] == ("unlist", "old")


async def test_with_models_on_the_command_line_added_models_are_not_loaded(home: Home):
    it = Reloading(home, models=("demo",))
    await it.take('models = ["a"]')
    assert it.started_loads == []
    assert it.running.said[0][:2] == ("list", "a")


async def test_new_kv_settings_of_a_loaded_model_wait_for_its_unload(home: Home):
    it = Reloading(home, 'models = ["demo"]')
    it.running.loaded = {"demo"}
    wanted = 'models = [{source = "demo", kv = "k8v4", priority = 3}]'
    for once in (True, False):
        changes = await it.take(wanted)
        assert Changed("models[demo].kv", "k8v8", "k8v4", "unload") in changes
        assert (Changed("models[demo].priority", 0, 3) in changes) is once
        assert it.reloader.pending == ("models[demo].kv",)
    it.running.loaded = set()
    assert await it.take(wanted) == [Changed("models[demo].kv", "k8v8", "k8v4")]
    assert it.started_loads == ["demo"]
    assert it.reloader.pending == ()


async def test_a_model_whose_name_is_taken_is_reported_at_every_reload(home: Home):
    it = Reloading(home)
    it.running.loaded = {"demo"}
    for _ in range(2):
        assert await it.take('models = ["demo"]') == [
            Changed("models[demo]", None, "demo", "unload")
        ]
    assert it.started_loads == []


@pytest.mark.parametrize("text", ["budget = 0", "bugdet = 1", "x", 'blas = "/no/library"'])
async def test_an_invalid_file_is_refused_as_a_whole(home: Home, text, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    home.create()
    it = Reloading(home, 'budget = "1GiB"')
    home.config.write_text(f'log_level = "error"\n{text}')
    with pytest.raises(ConfigError):
        await it.reloader.reload()
    assert it.reloader.settings == parse('budget = "1GiB"')
    assert it.running.said == []
    assert logging.getLogger().level != logging.ERROR


async def test_http_keys_and_origins_change_at_once_and_the_port_at_a_restart(home: Home):
    admitted = []
    it = Reloading(home)
    it.reloader._apply_http = admitted.append
    key = "sha256:" + "0" * 64
    changes = await it.take(f'[http]\nport = 1\norigins = ["https://a.example"]\nkeys.me = "{key}"')

    assert [(change.key, change.after, change.takes_effect) for change in changes] == [
        ("http.port", 1, "start"),
        ("http.keys", ["me"], "now"),
        ("http.origins", ["https://a.example"], "now"),
    ]
    assert [http.keys for http in admitted] == [{"me": key}]
    assert it.reloader.settings.http == admitted[0]
    assert it.reloader.pending == ("http.port",)
    assert await it.take(f'[http]\norigins = ["https://a.example"]\nkeys.me = "{key}"') == []


async def test_limits_of_the_prefix_store_change_at_once_and_its_encryption_at_a_restart(
    home: Home,
):
    it = Reloading(home)
    changes = await it.take('[prefix_store]\nlimit = "1GB"\nencrypt = true')

    assert [(change.key, change.after, change.takes_effect) for change in changes] == [
        ("prefix_store.limit", "1GB", "now"),
        ("prefix_store.encrypt", True, "start"),
    ]
    assert it.running.limits.limit_bytes == 10**9
    assert not it.reloader.settings.prefix_store.encrypt
    assert it.reloader.pending == ("prefix_store.encrypt",)
    assert await it.take('[prefix_store]\nlimit = "1GB"') == []


async def test_refused_http_settings_leave_all_settings_unchanged(home: Home):
    def refuses(_):
        raise ConfigError("no key", key="http.keys")

    it = Reloading(home, "log_level = 'info'")
    it.reloader._apply_http = refuses
    with pytest.raises(ConfigError, match="no key"):
        await it.take("log_level = 'debug'\n[http]\nhosts = ['a']")
    assert it.reloader.settings == parse("log_level = 'info'")


async def test_the_models_folder_is_read_at_start_and_when_the_setting_changes(home: Home):
    text = 'models_dir = "./shelf"\n[[models]]\nsource = "demo"\nalias = "b"\n'
    for name in ("a", "b"):
        shutil.copytree(demo.path(), home.root / "shelf" / name)
    known = known_models(parse(text), home.root)
    assert {name: (it.source, it.found) for name, it in known.items()} == {
        "a": (str(home.root / "shelf" / "a"), True),
        "b": ("demo", False),
    }
    it = Reloading(home, 'models_dir = ""')
    assert known_models(parse('models_dir = ""'), home.root) == {}
    assert await it.take('models_dir = "./shelf"') == [Changed("models_dir", "", "./shelf")]
    assert it.running.found.keys() == {"a", "b"}
