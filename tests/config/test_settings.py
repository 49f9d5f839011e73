"""Settings by key: their origin, live changes, and edits of the file's text."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvd.cli.config import page
from kvd.cli.config_file import edited_text, save
from kvd.config.config import Config, load, parse
from kvd.config.options import Options
from kvd.config.reload import Reloader
from kvd.config.settings import LiveSettings, flat, keys_in, table, with_value
from kvd.host.home import Home
from protocol.errors import ConfigError

HASH = "sha256:" + "a" * 64
TEXT = """\
# mine
budget = "8GiB"  # half of it
models = [
  "demo",  # small
  { source = "/m/qwen", alias = "q", priority = 2 },
]

[watchdog]
decode_s = 40.0
"""


class Running:
    """A system that applies every change."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def limit_prefix_store(self, limits):
        self.limits = limits

    async def set_budget(self, total_bytes):
        self.said.append(("budget", total_bytes))

    async def add_configured_model(self, name, known, policy):
        self.said.append(("list", name, policy))
        return True

    async def set_found_models(self, sources):
        self.found = sources

    async def remove_configured_model(self, name):
        raise AssertionError(name)


@pytest.fixture(autouse=True)
def level():
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


class Live:
    def __init__(
        self, home: Home, text: str = TEXT, running: Running | None = None, **options: Any
    ) -> None:
        home.create()
        home.config.write_text(text)
        given = Options(home, **options)
        self.running = running or Running()
        self.reloader = Reloader(
            given, load(home.config), self.running, default_budget=lambda: 7, load=lambda _: None
        )
        self.settings = LiveSettings(given, self.reloader)

    def __getitem__(self, key):
        return next(one for one in self.settings.table if one.key == key)


def test_every_field_of_the_configuration_has_a_key():
    keys = flat(Config()).keys()
    for field in Config.__struct_fields__:
        assert field == "models" or any(key.partition(".")[0] == field for key in keys)
    assert {"models[demo].priority", "models[q].source"} <= flat(parse(TEXT)).keys()


def test_the_origin_of_values(home: Home):
    live = Live(home)
    assert (live["budget"].value, live["budget"].origin) == ("8GiB", "file")
    assert (live["max_rows"].value, live["max_rows"].origin) == (32, "default")
    assert live["watchdog.decode_s"].origin == "file"
    assert live["watchdog.flush_s"].origin == "default"
    assert live["models[q].priority"].origin == "file"
    assert live["models[demo].priority"].origin == "default"
    assert [one.live for one in (live["budget"], live["max_rows"])] == [True, False]
    assert Live(home, budget_bytes=5)["budget"].origin == "command_line"


async def test_a_live_change_holds_until_the_file_is_read_again(home: Home):
    live = Live(home)
    (change,) = await live.settings.change({"budget": "4GiB"})
    assert (change.before, change.after, change.takes_effect) == ("8GiB", "4GiB", "now")
    assert live.running.said == [("budget", 4 << 30)]
    assert (live["budget"].value, live["budget"].origin) == ("4GiB", "live")
    await live.reloader.reload()
    assert (live["budget"].value, live["budget"].origin) == ("8GiB", "file")


async def test_none_restores_the_value_of_the_file(home: Home):
    live = Live(home)
    await live.settings.change({"budget": "4GiB", "log_level": "debug"})
    await live.settings.change({"budget": None, "log_level": None})
    assert [live[key].origin for key in ("budget", "log_level")] == ["file", "default"]
    assert live.running.said[-1] == ("budget", 8 << 30)


async def test_a_change_that_needs_a_restart_is_reported_and_not_applied(home: Home):
    live = Live(home)
    changes = await live.settings.change({"max_rows": 8, "watchdog.decode_s": 1.5})
    assert {(one.key, one.after, one.takes_effect) for one in changes} == {
        ("max_rows", 8, "start"),
        ("watchdog.decode_s", 1.5, "start"),
    }
    assert (live["max_rows"].value, live["max_rows"].origin) == (32, "default")
    home.config.write_text(TEXT.replace("# mine", "max_rows = 8"))
    row = live["max_rows"]
    assert (row.value, row.pending, row.next) == (32, True, 8)


async def test_a_live_budget_overrides_the_command_line(home: Home):
    live = Live(home, budget_bytes=5)
    (change,) = await live.settings.change({"budget": "1GiB"})
    assert change.takes_effect == "now"
    assert live.running.said == [("budget", 1 << 30)]
    await live.settings.budget_changed(77 << 20)
    assert live["budget"].value == 77 << 20


class Slow(Running):
    """A system that applies a budget only once the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def set_budget(self, total_bytes):
        self.asked.set()
        await self.may.wait()
        await super().set_budget(total_bytes)


@pytest.mark.parametrize("options", [{}, {"budget_bytes": 5}], ids=["file", "command_line"])
async def test_concurrent_changes_do_not_overwrite_each_other(home: Home, options):
    live = Live(home, running=Slow(), **options)
    first = asyncio.create_task(live.settings.change({"budget": "1GiB"}))
    await live.running.asked.wait()
    second = asyncio.create_task(live.settings.change({"log_level": "debug"}))
    await asyncio.sleep(0)  # the second change gets as far as the lock
    live.running.may.set()
    reported = [[(one.key, one.after) for one in await task] for task in (first, second)]
    assert reported == [[("budget", "1GiB")], [("log_level", "debug")]]
    assert live.running.said == [("budget", 1 << 30)]
    assert [live[key].value for key in ("budget", "log_level")] == ["1GiB", "debug"]


async def test_the_later_of_two_budgets_wins(home: Home):
    live = Live(home, running=Slow())
    first = asyncio.create_task(live.settings.change({"budget": "1GiB"}))
    await live.running.asked.wait()
    second = asyncio.create_task(live.settings.budget_changed(77 << 20))
    await asyncio.sleep(0)
    live.running.may.set()
    await asyncio.gather(first, second)
    assert live["budget"].value == 77 << 20


async def test_a_reload_reads_the_file_after_the_change_before_it_is_done(home: Home):
    live = Live(home, running=Slow())
    first = asyncio.create_task(live.settings.change({"budget": "1GiB"}))
    await live.running.asked.wait()
    second = asyncio.create_task(live.reloader.reload())
    await asyncio.sleep(0)
    home.config.write_text(TEXT.replace('"8GiB"', str(77 << 20)))
    live.running.may.set()
    await asyncio.gather(first, second)
    assert live["budget"].value == 77 << 20


async def test_a_budget_below_the_minimum_is_refused_however_it_is_set(home: Home):
    live = Live(home)
    for change in (
        live.settings.budget_changed(3),
        live.settings.change({"budget": 3}),
        live.settings.change({"budget": "63MiB"}),
    ):
        with pytest.raises(ConfigError, match="less than the minimum of 64") as caught:
            await change
        assert caught.value.detail["key"] == "budget"
    assert (live["budget"].value, live.running.said) == ("8GiB", [])


async def test_one_field_of_one_model_is_changed(home: Home):
    live = Live(home)
    (change,) = await live.settings.change({"models[demo].priority": 9})
    assert (change.key, change.before, change.after) == ("models[demo].priority", 0, 9)
    assert live.running.said == [("list", "demo", {"priority": 9})]
    assert live["models[demo].priority"].origin == "live"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"budgets": 1}, "no setting 'budgets'"),
        ({"decode_s": 1}, "did you mean watchdog.decode_s"),
        ({"watchdog": {}}, "did you mean watchdog.spawning_s"),
        ({"models[x].priority": 1}, "the configuration has no model 'x'"),
        ({"models[q].sauce": 1}, "no setting"),
        ({"models[q].kv.scheme": "k8v4"}, "no setting"),
        ({"http.keys.me.x": 1}, "no setting"),
        ({"http.keys.me": "secret"}, "sha256"),
        ({"budget": "much"}, "budget"),
        ({"log_level": "debug", "max_rows": 0}, "max_rows"),
    ],
)
async def test_a_bad_key_or_value_changes_nothing(home: Home, values, said):
    live = Live(home)
    before = flat(live.reloader.settings)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        await live.settings.change(values)
    assert flat(live.reloader.settings) == before
    assert live.running.said == []


def test_hashes_of_api_keys_are_not_shown(home: Home):
    home.create()
    home.config.write_text(f'[http]\nkeys = {{ me = "sha256:{"0" * 64}" }}\n')
    (row,) = [one for one in table(load(home.config), home.config) if one.key == "http.keys"]
    assert row.value == ["me"]
    assert "sha256" not in repr(row)


async def test_an_api_key_is_revoked_at_once_and_its_hash_is_not_shown(home: Home):
    live = Live(home, f'[http]\nkeys = {{ me = "sha256:{"0" * 64}", you = "sha256:{"1" * 64}" }}\n')
    changes = await live.settings.change({"http.keys": {"me": f"sha256:{'0' * 64}"}})
    assert [(one.key, one.before, one.after, one.takes_effect) for one in changes] == [
        ("http.keys", ["me", "you"], ["me"], "now")
    ]
    assert (live["http.keys"].value, live["http.keys"].live) == (["me"], True)


def test_a_broken_file_does_not_hide_the_current_settings(home: Home):
    live = Live(home)
    home.config.write_text("budget = ")
    assert live["budget"].value == "8GiB"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget", "2GiB"),
        ("max_rows", 8),
        ("watchdog.decode_s", 1.5),
        ("watchdog.flush_s", 9),
        ("http.port", 1234),
        ("models[demo].priority", 5),
        ("models[q].kv", "k8v4"),
    ],
)
def test_an_edited_file_has_the_new_value_and_keeps_everything_else(home: Home, key, value):
    home.create()
    home.config.write_text(TEXT)
    text = edited_text(home.config, key, value)
    assert flat(parse(text)) == flat(with_value(parse(TEXT), key, value))
    assert key in keys_in(text)
    for comment in ("# mine", "# half of it"):
        assert comment in text
    home.config.write_text(text)
    assert keys_in(edited_text(home.config, key, None)) == keys_in(text) - {key}
    assert keys_in(text) == keys_in(TEXT) | {key}


@pytest.mark.parametrize(
    "key", ["budget.x", "budget.8.x", "models.x", "watchdog.decode_s.x", "watchdog.decode_s.x.y"]
)
def test_removing_a_key_below_a_setting_changes_nothing(home: Home, key):
    home.create()
    home.config.write_text(TEXT)
    assert edited_text(home.config, key, None) == TEXT


def test_a_missing_file_counts_as_empty_and_a_broken_one_is_not_edited(home: Home):
    home.create()
    assert parse(edited_text(home.config, "max_rows", 8)).max_rows == 8
    assert edited_text(home.config, "max_rows", None) == ""
    for broken in (b"max_rows = ", b'# gr\xfc\xdfe\nbudget = "1GiB"'):
        home.config.write_bytes(broken)
        with pytest.raises(ConfigError):
            edited_text(home.config, "max_rows", 8)
        assert home.config.read_bytes() == broken


def test_a_file_that_cannot_be_written_is_a_config_error_and_stays(home: Home, monkeypatch):
    home.create()
    home.config.write_text(TEXT)
    before = sorted(home.root.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match=r"config\.toml: No space left on device; make its"):
            save(home.config, "max_rows", 8)
    assert sorted(home.root.iterdir()) == before
    assert home.config.read_text() == TEXT
    with pytest.raises(ConfigError, match="cannot write"):
        save(home.config / "config.toml", "max_rows", 8)


def test_a_written_file_keeps_its_mode_and_a_new_one_is_private(home: Home):
    home.create()
    save(home.config, "max_rows", 8)
    assert home.config.stat().st_mode & 0o777 == 0o600
    home.config.chmod(0o640)
    other = home.config.with_suffix(".new")
    other.write_text("of the user")
    save(home.config, "max_rows", 9)
    assert home.config.stat().st_mode & 0o777 == 0o640
    assert home.config.read_text() == "max_rows = 9\n"
    assert other.read_text() == "of the user"


def test_changes_at_the_same_time_are_all_saved(home: Home):
    home.create()
    (home.root / "linked.toml").write_text(TEXT)
    home.config.symlink_to("linked.toml")
    names = [f"key{number}" for number in range(8)]
    with ThreadPoolExecutor(len(names)) as threads:
        for done in [threads.submit(save, home.config, f"http.keys.{one}", HASH) for one in names]:
            done.result()
    assert sorted(load(home.config).http.keys) == names
    assert home.config.is_symlink()
    assert {file.name for file in home.root.iterdir()} == {
        "config.toml", "linked.toml", "logs", "cache",
    }  # fmt: skip


def test_of_two_new_keys_with_one_name_the_first_is_kept(home: Home):
    save(home.config, "http.keys.me", HASH, new=True)
    before = home.config.read_text()
    with pytest.raises(ConfigError, match=r"http\.keys\.me is set already"):
        save(home.config, "http.keys.me", HASH.replace("a", "b"), new=True)
    assert home.config.read_text() == before


def test_a_file_that_would_be_damaged_is_not_changed(home: Home):
    home.create()
    scattered = "http.port = 5\nmax_rows = 8\nhttp.host = '::1'\n"
    home.config.write_text(scattered)
    with pytest.raises(ConfigError, match=r"kvctl cannot change http\.keys\.me in .* yourself"):
        save(home.config, "http.keys.me", HASH)
    assert home.config.read_text() == scattered


def test_the_error_of_a_change_names_the_key_first():
    with pytest.raises(ConfigError, match=r"^budget: 3 B is less than the minimum"):
        with_value(parse(""), "budget", 3)


def test_the_page_shows_keys_values_and_pending_changes(home: Home):
    live = Live(home)
    home.config.write_text(TEXT.replace("# mine", "max_rows = 8"))
    console = Console(width=100, file=io.StringIO(), highlight=False)
    console.print(page(live.settings.table))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    lines = {row[0]: " ".join(row[1:]) for row in rows}
    assert lines["budget"] == "8GiB file live"
    assert lines["max_rows"] == "32 default at the next restart: 8"
    assert lines["models[q].priority"] == "2 file live"
    assert lines["models[q].source"] == "/m/qwen file while the model is not loaded"
    assert lines["prefill_chunk"] == "- default at a restart"
