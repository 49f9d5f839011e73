from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvd.cli import render
from protocol.errors import ErrorInfo
from protocol.types import ModelStatus
from tests.kvd.stub import MODEL, daemon_status


def shown(status, width):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(render.status(status, width))
    return console.file.getvalue()


FAILED = ModelStatus(
    name="a-model-with-quite-a-long-name",
    source="/models/a-model-with-quite-a-long-name",
    state="failed",
    restarts=3,
    error=ErrorInfo("model_failed", "3 crashes in 60 s [signal 11]"),
)


@pytest.mark.parametrize("width", [80, 100, 160, 200])
def test_no_line_is_wider_than_the_terminal(width):
    text = shown(daemon_status(MODEL, FAILED), width)
    assert max(map(len, text.splitlines())) <= width


def test_eighty_columns_have_what_matters():
    text = shown(daemon_status(MODEL), 80)
    header = next(line for line in text.splitlines() if line.startswith("MODEL"))
    row = next(line for line in text.splitlines() if line.startswith("demo"))
    assert header.split() == ["MODEL", "STATE", "KV", "ROWS", "PAGES", "TOK/S", "MEMORY"]
    assert " ".join(row.split()) == "demo ready k8v8 3+2 (max 8) 17/64 312 180 MiB"


def test_a_wide_terminal_has_the_rest():
    text = shown(daemon_status(MODEL), 160)
    for word in ("GRANTED", "90.0 MiB", "16384", "reference", "4242", "SOURCE"):
        assert word in text


def test_no_models_says_how_to_load_one():
    assert "kvctl load demo" in shown(daemon_status(), 80)


def test_a_failed_model_says_why_word_for_word():
    text = shown(daemon_status(FAILED), 80)
    assert "failed ↻3" in text
    assert "3 crashes in 60 s [signal 11]" in text
