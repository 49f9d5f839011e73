"""`kvctl bench-kv`: output, options and errors."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvd.cli import bench_kv, tool
from kvd.host import installed

RESULT = {
    "model": "demo",
    "shape": {"heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 6, "dtype": "float32"},
    "results": [
        {
            "scheme": scheme, "tokens": tokens, "bytes_per_token": 1728.0,
            "share_of_fp16": 0.5625, "k_error": 0.0053, "v_error": 0.0062,
            "output_error": 0.0049, "quantize_ms_per_1k": 9.7, "requantize_to": None,
            "requantize_ms_per_1k": None, "attend_ms": 2.05, "dense_attend_ms": 0.73,
        }
        for tokens in (1024, 4096) for scheme in ("k8v8", "k4v4")
    ],
}  # fmt: skip


@pytest.mark.mlx
@pytest.mark.process
def test_bench_kv_needs_no_daemon_and_prints_json(kvctl):
    shape = ("--heads", "2", "--kv-heads", "1", "--head-dim", "64", "--layers", "1")
    place = ("--schemes", "k8v8,k4v4", "--lengths", "192", "--json")
    code, out, err = kvctl("--home", "/nowhere", "bench-kv", *shape, "--dtype", "float32", *place)

    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["model"] is None
    assert [one["scheme"] for one in found["results"]] == ["k8v8", "k4v4"]


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["./nosuch"], "nosuch"),
        (["demo", "--schemes", "k9v9"], "bits"),
        (["--heads", "4"], "--layers"),
    ],
)
def test_invalid_measurements_are_refused_with_a_reason(kvctl, arguments, word):
    code, out, err = kvctl("bench-kv", *arguments)

    assert (code, out) == (6, "")
    assert word in err


@pytest.mark.parametrize(("width", "columns"), [(80, 8), (160, 11), (48, 5)])
def test_a_narrow_table_has_fewer_columns_and_all_complete(width, columns):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(bench_kv.table(RESULT, console))
    lines = console.export_text().splitlines()

    assert max(map(len, lines)) <= width
    assert sum(name in lines[0] for name in bench_kv._COLUMNS) == columns
    assert len([line for line in lines if "k4v4" in line]) == 2


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot{suffix}"
    bench_kv.draw(RESULT, file)

    assert file.read_bytes()[:8] in {b"\x89PNG\r\n\x1a\n", b"<?xml ve"}


def test_a_plot_without_matplotlib_says_what_to_install(kvctl, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_kv.importlib.util, "find_spec", lambda _: None)
    code, out, err = kvctl("bench-kv", "--plot", str(tmp_path / "plot.png"))
    assert (code, out) == (5, "")
    assert installed.find().command("plot") in err

    code, _, err = kvctl("bench-kv", "--plot", "plot.pdf")
    assert code == 6
    assert ".svg" in err


def test_the_last_line_of_a_process_that_dies_is_in_the_error(kvctl, monkeypatch):
    monkeypatch.setattr(
        tool,
        "environment",
        lambda _: {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"},
    )
    code, out, err = kvctl("bench-kv")

    assert (code, out) == (1, "")
    assert "ended early" in err
