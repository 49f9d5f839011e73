"""The log: limits on size and on workers' output, the level, and no prompts in tracebacks."""

from __future__ import annotations

import io
import json
import logging
import os
import sys

import pytest
import structlog

from kvd.daemon.rank import _OutputLines
from kvd.host import logs


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_files_are_bounded_in_size_and_number(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "FILE_BYTES", 4000)
    monkeypatch.setattr(logs, "FILES_KEPT", 2)
    before = os.umask(0o077)
    try:
        logs.setup(tmp_path, to_stderr=False)
        log = structlog.get_logger("kvd.worker")
        for number in range(500):
            log.info("worker output", line="x" * 40, number=number)
    finally:
        os.umask(before)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["kvd.log", "kvd.log.1", "kvd.log.2"]
    assert all(file.stat().st_size <= 4000 for file in files)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    lines = [json.loads(line) for file in reversed(files) for line in file.read_text().splitlines()]
    numbers = [line["number"] for line in lines]
    assert numbers == list(range(500 - len(numbers), 500))
    assert capsys.readouterr().err == ""  # logged to the file only


def test_the_level_may_change(tmp_path):
    logs.setup(tmp_path, "info", to_stderr=False)
    log = structlog.get_logger("kvd.x")
    log.debug("before")
    logs.set_level("debug")
    log.debug("now")
    logs.set_level("error")
    log.warning("after")
    said = [json.loads(line)["event"] for line in (tmp_path / "kvd.log").read_text().splitlines()]
    assert said == ["now"]


def test_a_traceback_on_a_terminal_shows_no_values_of_variables(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logs.setup(None)
    prompt = "secret " * 2  # no source line contains this value

    def serve(prompt: str) -> None:
        raise RuntimeError(len(prompt))

    try:
        serve(prompt)
    except RuntimeError:
        structlog.get_logger("kvd.http").exception("a handler failed")
    said = terminal.getvalue()
    assert prompt not in said
    assert "in serve" in said
    assert "RuntimeError: 14" in said


def test_a_large_file_from_launchd_is_truncated(tmp_path):
    path = tmp_path / "launchd.log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"x" * 100)
        logs.truncate_if_large(fd, 100)
        assert path.stat().st_size == 100
        os.write(fd, b"x")
        logs.truncate_if_large(fd, 100)
        os.write(fd, b"next\n")
    finally:
        os.close(fd)
    assert path.read_bytes() == b"next\n"  # at the start of the file, without a hole before it


def test_pipes_and_closed_descriptors_are_not_truncated():
    reading, writing = os.pipe()
    logs.truncate_if_large(writing, 0)
    os.close(reading)
    os.close(writing)
    logs.truncate_if_large(writing, 0)


async def test_excess_output_of_a_worker_is_omitted_and_counted():
    said, now = [], [0.0]
    lines = _OutputLines(lambda event, **fields: said.append((event, fields)), lambda: now[0])
    lines.data_received(b"line\n" * 5000)
    assert len(said) == 1000
    now[0] += 0.1  # enough time for two more lines
    lines.data_received(b"more\nand more\nand more\n")
    assert said[1000:] == [
        ("worker output omitted", {"lines": 4000}),
        ("worker output", {"line": "more"}),
        ("worker output", {"line": "and more"}),
    ]
    lines.connection_lost(None)
    assert said[-1] == ("worker output omitted", {"lines": 1})
    now[0] += 3600
    lines.data_received(b"line\n" * 5000)
    assert len([event for event, _ in said if event == "worker output"]) == 2002
