"""`kvctl logs`: filters, rotated files and new lines."""

from __future__ import annotations

import functools
import json
import logging

import pytest
import structlog

from kvd.cli.logs import following, last, line
from kvd.host import logs as daemon_logs
from kvd.host.home import Home


@pytest.fixture
def kvctl(kvctl):
    return functools.partial(kvctl, "logs")


@pytest.fixture
def written(home: Home, capsys):
    """A log file that the daemon's own logging wrote."""
    home.create()
    before = logging.getLogger().handlers[:], logging.getLogger().level
    daemon_logs.setup(home.logs, "debug")
    log = structlog.get_logger("kvd.test")
    log.debug("looked")
    log.info("model_state", model="demo", state="ready", reason=None)
    log.warning("governor", numbers={"freed_bytes": 3 << 20, "level": 1}, names=["a", "b"])
    log.error("actor failed", model="demo", exc_info=ZeroDivisionError("[odd]"))
    for handler in logging.getLogger().handlers:
        handler.close()
    logging.getLogger().handlers[:], level = before
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()
    capsys.readouterr()
    return home.logs / "kvd.log"


def test_lines_are_formatted_for_the_terminal_and_raw_as_json(kvctl, written):
    code, out, err = kvctl()
    assert (code, err) == (0, "")
    first, second, third, fourth, *trace = out.splitlines()
    assert first.split()[1:] == ["debug", "looked"]
    assert second.endswith("info    model_state  model=demo  state=ready")
    assert third.endswith('governor  freed=3.0 MiB  level=1  names=["a","b"]')
    assert "error" in fourth
    assert trace[-1] == "ZeroDivisionError: [odd]"
    assert kvctl("--json")[1] == written.read_text()


def test_lines_are_filtered_by_level_model_and_number(kvctl, written):
    assert kvctl("--level", "warning", "--json")[1].count("\n") == 2
    assert kvctl("demo", "--json")[1].count("\n") == 2
    assert json.loads(kvctl("demo", "-n", "1", "--json")[1])["event"] == "actor failed"
    assert kvctl("-n", "0")[1] == ""
    code, _, err = kvctl("--level", "loud")
    assert code == 2
    assert "'loud' is not one of 'debug'" in err


def test_a_missing_log_is_an_error_with_its_path(kvctl, home: Home):
    code, _, err = kvctl()
    assert code == 5
    assert str(home.logs) in err


def test_rotated_files_are_read_as_far_as_needed(tmp_path):
    path = tmp_path / "kvd.log"
    path.write_text("5\n6\n")
    (tmp_path / "kvd.log.1").write_text("3\n4\n")
    (tmp_path / "kvd.log.2").write_text("1\n2\n")
    assert last(path, 3, lambda _: True) == ["4\n", "5\n", "6\n"]
    assert last(path, 99, lambda text: text != "4\n") == ["1\n", "2\n", "3\n", "5\n", "6\n"]


def test_a_line_that_is_not_json_is_shown_unchanged():
    assert line("Traceback [red]?\n").plain == "--:--:-- info    Traceback [red]?"


def test_new_lines_are_complete_even_across_a_rotation(tmp_path):
    path = tmp_path / "kvd.log"
    path.write_text("old\n")

    def write(_seconds):
        act = acts.pop(0)
        act()

    def append(text):
        with path.open("a") as file:
            file.write(text)

    def rotate():
        path.rename(tmp_path / "kvd.log.1")

    acts = [
        lambda: append("one\ntw"),
        lambda: append("o\n"),
        rotate,
        lambda: path.write_text("three\n"),
    ]
    lines = following(path, write)
    assert [next(lines) for _ in range(3)] == ["one\n", "two\n", "three\n"]
    lines.close()


def test_following_waits_for_a_log_that_does_not_exist_yet(tmp_path):
    path = tmp_path / "kvd.log"
    lines = following(path, lambda _: path.write_text("first\n"))
    assert next(lines) == "first\n"
    lines.close()
