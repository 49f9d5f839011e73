"""`kvctl calibrate` with a stub for the measuring process."""

from __future__ import annotations

import json

import pytest

from kvd.cli import tool
from kvd.host.home import Home

STUB = """
import json, os, sys
sys.stderr.write("1/1 weights\\n")
tool, *arguments = sys.argv[1:]
assert tool == "calibrate", tool
if os.environ.get("STUB") == "dead":
    sys.exit("out of memory")
if os.environ.get("STUB") == "says nothing":
    sys.stderr.write("Killed\\n\\n  \\n")
    print("7")
    sys.exit(1)
print("a library greets you")
print("{}")
if os.environ.get("STUB") == "refuses":
    print(json.dumps({"error": {"code": "unknown_model", "message": "no [such] model"}}))
    sys.exit(1)
level = {"kl": 0.00002, "top1": 1.0, "perplexity_change": -0.0003, "allowed": True}
bad = {"kl": None, "top1": 0.5, "perplexity_change": None, "allowed": False}
lowest = os.environ.get("STUB", "k8v8")
first = level if lowest == "k8v8" else bad
mix = {"mix": ["k4v3", "k4v3", "k6v5"], "uniform_kl": 0.001}
levels = [{"scheme": "k8v8", "mix": []} | first, {"scheme": "k4v4"} | mix | bad]
print(json.dumps({
    "lowest": lowest, "levels": levels, "max_kl": 0.02, "min_top1": 0.95, "file": "/h/[1].json",
    "prompts": 4, "tokens": 1024, "text": "/h/[own].txt", "arguments": arguments,
}))
"""


@pytest.fixture
def kvctl(kvctl, monkeypatch, tmp_path):
    package = tmp_path / "stub" / "kvd" / "worker" / "tools"
    package.mkdir(parents=True)
    # Without these files Python would import the real packages.
    for folder in (package.parents[1], package.parent, package):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(STUB)

    def run(*arguments, stub="k8v8"):
        environment = {"PYTHONPATH": str(tmp_path / "stub"), "STUB": stub}
        monkeypatch.setattr(tool, "environment", lambda _: environment)
        monkeypatch.chdir(tmp_path)
        return kvctl(*arguments)

    return run


@pytest.mark.process
def test_the_result_is_a_table_and_a_sentence(kvctl):
    code, out, err = kvctl("calibrate", "demo")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["LEVEL", "KL", "TOP-1", "PERPLEXITY", "QUALITY", "BITS", "BY", "LAYER"],
        ["k8v8", "2e-05", "100.00%", "-0.03%", "allowed", "the", "same", "in", "all"],
        [
            "k4v4",
            "not",
            "finite",
            "50.00%",
            "not",
            "finite",
            "too",
            "low",
            "2",
            "k4v3,",
            "k6v5",
            "(0.001",
            "without)",
        ],
    ]
    assert "outside a running daemon's budget" in err
    assert "rows may step down as far as k8v8 (KL up to 0.02, top-1 from 0.95)" in err
    assert "measured on 4 texts of up to 1024 tokens from /h/[own].txt" in err
    assert "/h/[1].json" in err


@pytest.mark.process
def test_a_model_without_an_allowed_level_is_reported(kvctl):
    _, _, err = kvctl("calibrate", "demo", stub="k16v16")
    assert "even k8v8 misses the limits" in err


@pytest.mark.process
def test_json_output_and_the_process_s_arguments(kvctl, home: Home, tmp_path):
    code, out, err = kvctl(
        "calibrate", "./model", "--json", "--kv", "k8v4", "--kv-group-size", "32",
        "--kv-schemes", "k4v4,k2v2", "--max-kl", "0.5", "--prompts", "2",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert json.loads(out)["arguments"] == [
        f"--home={home.root}", "--schemes=k8v4g32,k4v4g32,k2v2g32", "--max-kl=0.5",
        "--min-top1=0.95", "--prompts=2", "--tokens=1024", str(tmp_path / "model"),
    ]  # fmt: skip
    assert home.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.process
def test_errors_of_the_process_have_messages_and_exit_codes(kvctl):
    code, out, err = kvctl("calibrate", "demo", "--json", stub="refuses")
    assert (code, json.loads(out)["error"]["code"]) == (6, "unknown_model")
    assert "no [such] model" in err
    code, _, err = kvctl("calibrate", "demo", stub="dead")
    assert code == 1
    assert "ended early: out of memory" in err
    code, _, err = kvctl("calibrate", "demo", stub="says nothing")
    assert code == 1
    assert "ended early: Killed" in err


@pytest.mark.parametrize(
    "wrong", [["--kv", "k9v9"], ["--max-kv-size", "512"], ["--kv-floor", "0=k8v8"]]
)
def test_settings_that_calibration_does_not_measure_are_refused(kvctl, wrong):
    assert kvctl("calibrate", "demo", *wrong)[0] == 2


def test_a_folder_with_other_files_is_not_used_as_a_home(kvctl, home: Home):
    home.root.mkdir()
    (home.root / "thesis.tex").write_text("")
    code, _, err = kvctl("calibrate", "demo")
    assert code == 5
    assert "is not a home of kvd" in err


@pytest.mark.process
def test_the_text_is_given_with_its_whole_path(kvctl, tmp_path, monkeypatch):
    (tmp_path / "own.txt").write_text("words")
    monkeypatch.chdir(tmp_path)  # where the command looks for it
    _, out, _ = kvctl("calibrate", "demo", "--json", "--text", "own.txt")
    assert f"--text={tmp_path / 'own.txt'}" in json.loads(out)["arguments"]
    code, _, err = kvctl("calibrate", "demo", "--text", "none.txt")
    assert code == 2
    assert "none.txt" in err
