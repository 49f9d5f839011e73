from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from kvd.cli import render
from protocol.errors import ErrorInfo
from protocol.types import KVSpec, ModelStatus
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


@pytest.mark.parametrize("width", [40, 80, 100, 160, 200])
def test_no_line_is_wider_than_the_terminal(width):
    text = shown(daemon_status(MODEL, FAILED), width)
    assert max(map(len, text.splitlines())) <= width


def table(text):
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("MODEL"))
    return re.split(r"  +", lines[head].strip()), lines[head + 1]


ALL = ["MODEL", "STATE", "KV", "ROWS", "PAGES", "TOK/S", "MEMORY"]
ALL += ["GRANTED", "KV USED", "HITS", "CONTEXT", "ATTENTION", "PID", "SOURCE"]


def test_eighty_columns_have_what_matters():
    header, row = table(shown(daemon_status(MODEL), 80))
    assert header == ALL[:9]
    assert " ".join(row.split()) == "demo ready k8v8 3+2 (max 8) 17/64 312 180 MiB 90.0 MiB 1.7 MiB"


def test_a_wide_terminal_has_the_rest():
    text = shown(daemon_status(MODEL), 160)
    assert table(text)[0] == ALL
    for word in ("90.0 MiB", "83%", "16384", "reference", "4242"):
        assert word in text


def test_forty_columns_still_name_the_model_and_its_state():
    header, row = table(shown(daemon_status(MODEL), 40))
    assert header == ["MODEL", "STATE", "ROWS", "MEMORY"]
    assert row.split()[:2] == ["demo", "ready"]


@pytest.mark.parametrize("width", [40, 60, 80, *range(100, 130), 160, 200])
def test_every_column_that_is_shown_is_whole(width):
    text = shown(daemon_status(MODEL, FAILED), width)
    header, row = table(text)
    assert [name for name in ALL if name in header] == header
    assert header[:2] == ["MODEL", "STATE"]
    assert row.split()[:2] == ["demo", "ready"]
    assert "failed" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    rows = text.splitlines()[text.splitlines().index("") + 1 :]
    assert len([line for line in rows if line.strip()]) <= 6  # a name wraps, no letter by itself


def test_no_models_says_how_to_load_one():
    assert "kvctl load demo" in shown(daemon_status(), 80)


def test_a_failed_model_says_why_word_for_word():
    text = shown(daemon_status(FAILED), 80)
    assert "failed ↻3" in text
    assert "3 crashes in 60 s [signal 11]" in text


def test_the_line_about_a_loaded_model_says_the_scheme_it_got():
    lifted = msgspec.structs.replace(MODEL, kv=KVSpec(4, 4))  # by a calibration
    assert "  k8v8  " in render.model(lifted).plain
    assert "  k4v4" in render.model(msgspec.structs.replace(lifted, info=None)).plain


def test_models_that_are_not_loaded_are_named():
    status = msgspec.structs.replace(daemon_status(MODEL), asleep=["chat", "code"])
    assert "not loaded, until a request names them: chat, code" in shown(status, 100)
    assert "no models" not in shown(msgspec.structs.replace(status, models=[]), 100)


def test_a_pinned_model_and_a_violation_show():
    pinned = msgspec.structs.replace(MODEL, pinned=True)
    status = msgspec.structs.replace(daemon_status(pinned), violations=2)
    assert "ready pinned" in shown(status, 200)
    assert "exceeded 2 times" in shown(status, 200)
