"""`bench.gpu.all`: each command is right, runs on a CPU, ends in time and is run once."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from bench.gpu import all as runner
from bench.gpu import train
from bench.gpu.measurements import (
    MIXED_BITS,
    TRACES,
    Measurement,
    decode_speed,
    fidelity,
    measurements,
)
from kvd.bench import traces
from tests.pages import ROOT
from tests.process.helpers import alive, wait_for

pytestmark = pytest.mark.mlx

EVERY = {one.name: one for one in measurements(7.0)}
TESTED = ("bench.gpu", "bench.gpu.starts", "bench.packed", "bench.attention", "bench.ssd.engine")
"""Modules whose ``main`` runs in tests of their own."""
FOLDERS = {"model": "MODEL", "disk": "DISK", "data": "DATA", "trained": "TRAINED"}


class Parsed(Exception):
    """The module's options were accepted."""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """A folder of random weights, which measurements share."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("dry", [False, True], ids=["full", "dry"])
@pytest.mark.parametrize("one", EVERY.values(), ids=EVERY)
def test_each_module_accepts_its_options(
    one: Measurement, dry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*args: Any, **more: Any) -> None:
        options = parse(*args, **more)
        assert str(options.json) == "FILE"
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    arguments = one.arguments(FOLDERS, "FILE", dry=dry)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    package = importlib.util.find_spec(one.module).submodule_search_locations
    module = importlib.import_module(f"{one.module}.__main__" if package else one.module)
    with pytest.raises(Parsed):
        module.main()


def test_a_dry_run_has_the_options_of_a_full_one() -> None:
    more = {one.name: set(one.dry) - set(one.options) for one in EVERY.values()}

    assert {name: options for name, options in more.items() if options} == {
        "attention-bits": {"--schemes", "--small"},
        "calibrate": {"--prompts", "--tokens"},
        "pressure-0.6b": {"--prompt"},
        "pressure-8b": {"--prompt"},
        "engine": {"--rows", "--tokens", "--chunk"},
        "train": {"--tokens", "--eval-lengths"},
    }
    assert all(name in traces.TRACES for name in TRACES.split())


def test_the_training_has_these_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, its modules cannot be imported here."""
    commands: list[list[str]] = []

    def run(module: str, *arguments: object) -> None:
        commands.append([module, *map(str, arguments)])
        if module == "train":
            folder = Path(str(arguments[arguments.index("--out") + 1]))
            line = "  60 s  step 9  progress 1.000  loss 2.0  recall 256:0.99 8192:0.875 prose 2.6"
            (folder / "log.txt").write_text(f"{line}\n")
        else:
            (tmp_path / "model").mkdir()

    monkeypatch.setattr(train, "_module", run)
    monkeypatch.setitem(FOLDERS, "trained", str(tmp_path / "model"))
    file = tmp_path / "train.json"
    train.main(EVERY["train"].arguments(FOLDERS, str(file), dry=True))

    assert [command[0] for command in commands] == ["train", "export"]
    for module, *arguments in commands:
        source = (ROOT / f"tools/demo_model/demo_training/{module}.py").read_text()
        for option in (one for one in arguments if one.startswith("--")):
            assert f'"{option}"' in source, (module, option)
    model = (ROOT / "tools/demo_model/demo_training/model.py").read_text()
    full = EVERY["train"].arguments(FOLDERS, "", dry=False)
    for name in json.loads(full[full.index("--config") + 1]):
        assert re.search(rf"^    {name}: int", model, re.MULTILINE), name
    assert json.loads(file.read_text())["recall"] == {"256": 0.99, "8192": 0.875}
    assert {one.name for one in (tmp_path / "model").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_bar_of_bits_by_layer_compares_rows_of_the_same_length() -> None:
    rows = [
        ("k4v4", 100, 50.0),
        ("k4v4", 200, 40.0),
        (MIXED_BITS, 100, 45.0),
        (MIXED_BITS, 200, 32.0),
    ]
    report = {"decode": [{"kv": kv, "tokens": n, "tok_s": speed} for kv, n, speed in rows]}
    assert [(bar["value"], bar["passed"]) for bar in decode_speed(report)] == [
        (0.9, True),
        (0.8, False),
    ]


def test_bars_of_fidelity() -> None:
    part = {"kl": 3e-4, "top1": 0.998}
    row = {"recipe": "k8v8", "length": 512, "prefill": part, "decode": None}
    bars = fidelity({"results": [row, row | {"recipe": "k2v2"}]})

    assert [(bar["what"], bar["passed"]) for bar in bars] == [
        ("k8v8, 512 tokens, prefill: KL", False),
        ("k8v8, 512 tokens, prefill: top-1", True),
    ]


def made(name: str, estimate_s: float = 1.0, do: str = "write", **more: Any) -> Measurement:
    options = {"--do": do, "--count": "{disk}/" + name}
    return Measurement(name, "tests.bench.measured", options, {}, estimate_s, packages=(), **more)


def test_calls_hold_what_fits_and_the_important_first() -> None:
    some = [made("a", 50), made("b", 60), made("c", 40), made("d", 200), made("e", 30)]
    found = runner.calls(some, 100)

    assert [[one.name for one in call] for call in found] == [["a", "c"], ["b", "e"]]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, some: list[Measurement], *more: str) -> int:
    monkeypatch.setattr(runner, "measurements", lambda _: some)
    where = ["--out", str(folder / "out"), "--models", str(folder), "--disk", str(folder)]
    return runner.main([*where, *more])


def outcomes(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "summary.json").read_text())["measurements"]


def test_a_failure_stops_nothing_and_is_repeated_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = made("late", 1e6)
    some = [made("bad", do="fail"), made("good"), made("other", needs={"--count": "x"}), late]
    assert run(monkeypatch, tmp_path, some, "--seconds", "1000") == 1
    found = outcomes(tmp_path)

    assert [(name, one["status"]) for name, one in found.items()] == [
        ("bad", "failed"), ("good", "done"), ("other", "skipped"),
    ]  # fmt: skip
    assert "no such device" in found["bad"]["log"]
    assert found["other"]["reason"] == f"missing: {tmp_path}/other/x"
    for name in ("bad", "good"):
        assert [bar["what"] for bar in found[name]["bars"]] == ["speed"]
        assert (tmp_path / "out" / f"{name}.json").exists()
    printed = capsys.readouterr().out
    assert "speed: 2.000, at least 3: MISS" in printed
    assert "no time for late" in printed

    run(monkeypatch, tmp_path, some, "--plan", "--seconds", "1000")
    assert "call 1, 2 s: other, bad" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, some, "--seconds", "1000") == 1
    assert (tmp_path / "bad").read_text().count("started") == 2
    assert (tmp_path / "good").read_text().count("started") == 1
    assert run(monkeypatch, tmp_path, some[1:], "--seconds", "1000", "--skip", "late") == 0


def test_what_takes_too_long_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = made("slow", do="hang", more_time=0.0)
    monkeypatch.setattr(Measurement, "limit_s", 3.0)
    assert run(monkeypatch, tmp_path, [slow]) == 1
    (found,) = outcomes(tmp_path).values()

    assert found["status"] == "failed"
    assert found["reason"] == "took more than 3 s"
    child = int((tmp_path / "slow").read_text())
    wait_for("the child has ended", lambda: not alive(child))


@pytest.mark.parametrize("cut", [True, False])
def test_a_measurement_is_not_started_if_writing_weights_took_its_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    cut: bool,
) -> None:
    """``cut``: whether the weights are not written by the end of the call."""
    real, start = runner.run, time.monotonic()

    def write(command: Sequence[str], log: Path, limit_s: float, _: dict[str, str]) -> runner.Ended:
        assert "--shape" in command
        monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: start + 900))
        log.touch()
        Path(command[-1]).mkdir()
        monkeypatch.setattr(runner, "run", real)
        return runner.Ended(None if cut else 0, 900)

    monkeypatch.setattr(runner, "run", write)
    some = [made("one", 900, model="tiny"), made("two", 30)]
    assert run(monkeypatch, tmp_path, some, "--seconds", "1000") == 0
    assert {name: one["status"] for name, one in outcomes(tmp_path).items()} == {"two": "done"}
    assert "no time for one" in capsys.readouterr().out
    assert (tmp_path / "kvd-tiny").exists() != cut


def test_results_of_dry_runs_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path, [made("good")], "--dry") == 0
    with pytest.raises(SystemExit, match="has results of --dry"):
        run(monkeypatch, tmp_path, [made("good")])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    # The first measurement of each module
    {one.module: one.name for one in reversed(EVERY.values()) if one.module not in TESTED}.values(),
)
def test_each_measurement_runs_on_a_cpu(
    name: str, short: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One shape for all. The embedded model's, which some have in a dry run, takes longer.
    some = [replace(one, dry_model="tiny") for one in EVERY.values()]
    monkeypatch.setattr(runner, "measurements", lambda _: some)
    out = short / "out"
    where = ["--out", str(out), "--models", str(models), "--disk", str(short), "--data", str(short)]
    assert runner.main(["--dry", "--only", name, *where]) == 0
    found = json.loads((out / "summary.json").read_text())["measurements"][name]

    if name == "train":  # needs torch and the prepared text
        assert found["status"] == "skipped"
        assert "data.npz" in found["reason"]
    else:
        assert found["status"] == "done"
        assert json.loads((out / f"{name}.json").read_text())
