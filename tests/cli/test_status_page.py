"""The page of `kvctl status`: columns by width, and the summary of `kvctl load`."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from kvd.cli import status_page
from protocol.device import DeviceStatus
from protocol.errors import ErrorInfo
from protocol.kv import KVSpec
from protocol.types import ModelStatus, Reclaimable, WorkerStats
from tests.cli.stub import MODEL, daemon_status

GIB = 2**30


def shown(status, width):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(status_page.status(status, width))
    return console.file.getvalue()


def summary(model, width):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(status_page.model(model, width))
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


def test_status_shows_the_http_address():
    both = ["http://127.0.0.1:11711", "unix:/home/you/.kvd/http.sock"]
    value = msgspec.structs.replace(daemon_status(MODEL), http=both)
    assert "http   http://127.0.0.1:11711/v1\n" in shown(value, 80)
    assert "http" not in shown(daemon_status(MODEL), 80)


def test_status_shows_gpus_and_the_budget_of_the_host():
    gpu = DeviceStatus(budget_bytes=60 * GIB, granted_bytes=30 * GIB)
    host = DeviceStatus(budget_bytes=10 * GIB, granted_bytes=5 * GIB)
    value = msgspec.structs.replace(daemon_status(MODEL), devices=[gpu, gpu], host_budget=host)
    lines = [line.split() for line in shown(value, 80).splitlines()]
    gpus = [" ".join(line[-5:]) for line in lines if line[:1] == ["GPU"]]
    assert gpus == ["30.0 GiB of 60.0 GiB"] * 2
    assert [" ".join(line[-5:]) for line in lines if line[:1] == ["host"]] == [
        "5.0 GiB of 10.0 GiB"
    ]


def table(text):
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("MODEL"))
    return re.split(r"  +", lines[head].strip()), lines[head + 1]


BUSY = msgspec.structs.replace(MODEL, paused=1, source="/models/demo")
ALL = ["MODEL", "STATE", "ROWS", "QUEUED", "PAUSED", "TOK/S", "KV", "LEVELS"]
ALL += ["GRANTED", "MEMORY", "HITS", "PAGES", "CONTEXT", "ATTENTION", "PID", "SOURCE"]


def test_a_width_of_80_shows_the_most_important_columns():
    header, row = table(shown(daemon_status(BUSY), 80))
    assert header == ALL[:10]
    assert " ".join(row.split()) == "demo ready 3 1 1 312 1.7 MiB k8v8 90.0 MiB 180 MiB"


def test_columns_without_values_are_omitted():
    idle = msgspec.structs.replace(MODEL, stats=WorkerStats())
    header, _ = table(shown(daemon_status(idle), 200))
    assert not {"QUEUED", "PAUSED", "HITS", "SOURCE"} & set(header)


def test_requests_for_a_loading_model_are_queued():
    loading = ModelStatus(name="new", source="new", state="loading", requests=4)
    header, row = table(shown(daemon_status(loading), 80))
    assert dict(zip(header, row.split(), strict=False))["QUEUED"] == "4"


def test_levels_show_the_share_of_pages_by_scheme():
    def on(*held):
        memory = msgspec.structs.replace(MODEL.stats.memory, kv_levels=held)
        stats = msgspec.structs.replace(MODEL.stats, memory=memory)
        return status_page.levels(msgspec.structs.replace(MODEL, stats=stats))

    assert on().plain == on(5, 0, 0).plain == "k8v8"
    mixed = on(620, 0, 380)
    assert mixed.plain == "k8v8 62% k4v4 38%"
    assert [span.style for span in mixed.spans] == ["green", "red"]


@pytest.mark.parametrize(
    ("granted", "text", "filled"),
    [(0, "0 B of 1.0 GiB, 0%", 0), (2**29, ", 50%", 7), (2**30 - 1, ", 100%", 13)],
)
def test_the_bar_is_full_only_when_the_budget_is(granted, text, filled):
    status = msgspec.structs.replace(daemon_status(), granted_bytes=granted)
    line = shown(status, 80).splitlines()[1]
    assert text in line
    assert line.count("█") == filled


def test_a_budget_below_the_grants_shows_the_difference():
    status = msgspec.structs.replace(daemon_status(MODEL), budget_bytes=80 << 20)
    text = shown(status, 160)
    assert "90.0 MiB of 80.0 MiB, 10.0 MiB above the lowered budget; models give it back" in text
    assert "░" not in text


def test_a_budget_below_what_pinned_models_keep_needs_the_user():
    pinned = msgspec.structs.replace(MODEL, pinned=True, granted_bytes=90 << 20)
    status = msgspec.structs.replace(daemon_status(pinned), budget_bytes=80 << 20)
    assert "10.0 MiB above the lowered budget; unpin or unload a model" in shown(status, 160)
    given = msgspec.structs.replace(MODEL.stats, reclaimable=Reclaimable(base=70 << 20))
    pinned = msgspec.structs.replace(pinned, stats=given)
    status = msgspec.structs.replace(daemon_status(pinned), budget_bytes=80 << 20)
    assert "above the lowered budget; models give it back" in shown(status, 160)


def test_a_wide_terminal_shows_all_columns():
    text = shown(daemon_status(BUSY), 160)
    assert table(text)[0] == ALL
    for word in ("90.0 MiB", "83%", "16384", "reference", "4242"):
        assert word in text


def test_a_width_of_40_still_shows_the_model_and_its_state():
    header, row = table(shown(daemon_status(MODEL), 40))
    assert header == ["MODEL", "STATE", "ROWS", "QUEUED", "TOK/S"]
    assert row.split()[:2] == ["demo", "ready"]


@pytest.mark.parametrize("width", [40, 60, 80, *range(100, 130), 160, 200])
def test_every_shown_column_is_complete(width):
    text = shown(daemon_status(MODEL, FAILED), width)
    header, row = table(text)
    assert [name for name in ALL if name in header] == header
    assert header[:2] == ["MODEL", "STATE"]
    assert row.split()[:2] == ["demo", "ready"]
    assert "failed" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    rows = text.splitlines()[text.splitlines().index("") + 1 :]
    assert (
        len([line for line in rows if line.strip()]) <= 6
    )  # the long name wraps, but not to one letter per line


def test_a_source_that_looks_like_markup_is_shown_unchanged():
    odd = msgspec.structs.replace(MODEL, source="/models/[red]x[/]")
    assert "/models/[red]x[/]" in shown(daemon_status(odd), 200)


def test_without_models_status_says_how_to_load_one():
    assert "kvctl load demo" in shown(daemon_status(), 80)


def test_a_failed_model_shows_its_error():
    text = shown(daemon_status(FAILED), 80)
    assert "failed ↻3" in text
    assert "3 crashes in 60 s [signal 11]" in text


def test_the_summary_of_a_load_shows_the_effective_scheme():
    # `info` has k8v8, because calibration does not allow the requested k4v4.
    lifted = msgspec.structs.replace(MODEL, kv=KVSpec(4, 4))
    assert "  k8v8  " in summary(lifted, 160)
    assert "  k4v4" in summary(msgspec.structs.replace(lifted, info=None), 160)


def test_the_summary_of_a_load_wraps_between_words():
    words = summary(MODEL, 160).split()
    lines = summary(MODEL, 60).splitlines()
    assert len(summary(MODEL, 160).splitlines()) == 1
    assert [word for line in lines for word in line.split()] == words
    assert len(lines) == 3
    assert all(line.startswith("  ") for line in lines[1:])


def test_unloaded_models_are_listed():
    status = msgspec.structs.replace(daemon_status(MODEL), unloaded=["chat", "code"])
    assert "unloaded, loaded by the next request: chat, code" in shown(status, 100)
    assert "no models" not in shown(msgspec.structs.replace(status, models=[]), 100)


def test_a_pinned_model_and_a_violation_are_shown():
    pinned = msgspec.structs.replace(MODEL, pinned=True)
    status = msgspec.structs.replace(daemon_status(pinned), violations=2)
    assert "ready pinned" in shown(status, 200)
    assert "exceeded 2 times" in shown(status, 200)
