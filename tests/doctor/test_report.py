"""The selftest's report: its schema, and what it must not contain."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvd.cli import doctor_selftest
from kvd.cli.app import app
from kvd.cli.doctor_page import speed_table
from kvd.doctor import machine, selftest
from kvd.doctor.finding import Section, fail, ok, warn
from kvd.doctor.measurements import Cell, Served, Side, Speed
from kvd.doctor.privacy import Names
from kvd.doctor.report import Report, save, write
from kvd.doctor.scene import Scene
from kvd.doctor.speed import Model
from kvd.host.home import Home
from protocol.errors import UnknownModel

NAMES = Names("/Users/anna", "/Users/anna/.kvd", "/tmp", "anna", "annas-mac.local")
SIDE = Side(
    load_s=2.0, load={"weights": 2.0}, dtype="float32", loaded_bytes=1, mlx_peak_bytes=2,
    process_peak_bytes=3,
)  # fmt: skip
SIZE = Cell(kind="prefill", rows=8, prompt=2048, output=1)
SPEED = Speed(
    model="demo",
    beside_daemon=False,
    served=Served(
        architecture="qwen3", parameters=5_800_000, layers=6, context_length=4096, kv_scheme="k8v8",
        attention_path="native", attention_error=1e-6, device="cpu", fused=None, paths=[],
    ),
    kvd=SIDE,
    mlx_lm=SIDE,
    cells=[Cell.of(SIZE, [123456.0], [12345.0]), SIZE],
)  # fmt: skip


def scene(home: Home) -> Scene:
    found = Scene(home)
    vars(found)["engine"] = {"mlx": "0.32.4", "device": "cpu", "blas": "/Users/anna/lib/blas.so"}
    return found


def sections(home: Home) -> list[Section]:
    return [
        Section("Machine", [ok("hub cache", "2 models in /Users/anna/.cache, on annas-mac")]),
        Section("Home", [warn("models[0]", f"no {home.root}/secret-model", "correct it")]),
        Section("Daemon", [fail("model secret-model", "sk-secret is wrong", "report it")]),
        Section("Selftest: computing", [ok("a", "in /Volumes/anna/x", traceback="/tmp/kvd-1/h")]),
    ]


def test_the_file_has_the_schema(home: Home, tmp_path: Path) -> None:
    report = Report.of(scene(home), sections(home), SPEED, quick=True)
    path = write(report, NAMES, tmp_path / "new" / "r.json")
    found = msgspec.json.decode(path.read_bytes(), type=Report, strict=True)
    assert (found.format, found.version) == ("kvd-selftest", 1)
    assert (found.verdict, found.quick) == ("fail", True)
    assert found.speed == SPEED
    assert found.versions.keys() >= {"kvd", "mlx", "mlx-lm"}
    assert found.machine.cores >= found.machine.usable_cores >= 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["r.json"]


def test_the_file_names_no_person_and_no_machine(home: Home, tmp_path: Path) -> None:
    report = Report.of(scene(home), sections(home), SPEED, quick=True)
    text = write(report, NAMES, tmp_path / "r.json").read_text()
    for private in ("anna", "secret", str(home.root), "/tmp/kvd-1"):
        assert private not in text
    found = json.loads(text)
    findings = [one for part in found["sections"] for one in part["findings"]]
    texts = ["2 models in ~/.cache, on HOST", "", "", "in /Volumes/USER/x"]
    assert [one["observed"] for one in findings] == texts
    assert [one["verdict"] for one in findings] == ["ok", "warn", "fail", "ok"]
    assert found["engine"]["blas"] == "~/lib/blas.so"


def test_the_target_of_a_link_is_replaced_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_bytes(b"old")
    link.symlink_to(target)
    save(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save(pipe, b"new")
    assert os.read(reader, 10) == b"new"
    assert pipe.is_fifo()
    os.close(reader)


def test_a_file_that_cannot_be_written_is_named(home: Home, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "r.json"
    result = CliRunner().invoke(app, ["doctor", "--home", str(home.root), "--json", str(file)])
    assert isinstance(result.exception, SystemExit)
    assert f"cannot write {file}" in "".join(result.output.split("\n"))


def test_names_inside_of_words_stay() -> None:
    names = Names("/", "/home/x/.kvd", "/tmp", "max", "ab")
    found = names.without("maximum /max/a /maximum ab /tmpfile")
    assert found == "maximum /USER/a /maximum ab /tmpfile"


def test_names_of_this_machine(tmp_path: Path) -> None:
    found = Names.of_this_machine(tmp_path)
    assert found.without(f"{Path.home()}/x {tmp_path}/y") == "~/x $KVD_HOME/y"
    if len(socket.gethostname()) > 2:
        assert found.without(socket.gethostname()) == "HOST"


def test_the_folder_of_the_model_is_not_named(tmp_path: Path) -> None:
    """A broken model's error has the path of a file in it."""
    link = tmp_path / "secret-link"
    link.symlink_to("/srv/acme/secret")
    for model in (Model("/srv/acme/secret", link), Model("/srv/acme/secret", Path("secret"))):
        names = Names.of_this_machine(tmp_path / "home", model.private_paths)
        for path in model.private_paths:
            text = f"{path}/config.json is no JSON"
            assert names.without(text) == "$MODEL/config.json is no JSON"
    assert Model("demo", tmp_path).private_paths == ()


def test_processors_are_described(home: Home, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Epyc\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\n"
    )
    found = machine.describe(Scene(home, root=tmp_path))
    assert found.features == ["avx2", "avx512f"]
    assert found.processor


def test_the_table_fits_80_columns() -> None:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    with console.capture() as printed:
        console.print(speed_table(SPEED))
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("prefill, 8 rows, 2048 tokens  123456   12345  10.00" in line for line in lines)
    assert any(line.rstrip().endswith("skipped") for line in lines)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selftest that only measures, with known results."""

    def run(_scene, _model, measured, **_how):
        measured.speed = SPEED
        yield "a trial"
        yield Section("Selftest: speed", [ok("load", "fast")])

    monkeypatch.setattr(selftest, "run", run)


@pytest.mark.process
@pytest.mark.usefixtures("short")
def test_the_command_writes_one_file(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["doctor", "--home", str(home.root), "--selftest"]
    done = CliRunner().invoke(app, [*arguments, "--json", "out/a.json"])
    assert "kvd beside mlx-lm: demo" in done.output
    assert json.loads((tmp_path / "out/a.json").read_text())["speed"]["model"] == "demo"

    done = CliRunner().invoke(app, [*arguments, "--json"])
    (file,) = tmp_path.glob("kvd-selftest-*.json")
    assert done.stdout == file.read_text()
    assert json.loads(done.stdout)["format"] == "kvd-selftest"


def test_options_of_the_selftest_need_it(home: Home) -> None:
    done = CliRunner().invoke(app, ["doctor", "--home", str(home.root), "--model", "demo"])
    assert done.exit_code == 2
    assert "--model need --selftest" in done.output


def test_models_are_found_without_a_download(home: Home, tmp_path: Path) -> None:
    home.create()
    (home.root / "models/mine").mkdir(parents=True)
    home.config.write_text(f'models = [{{source = "{tmp_path}", alias = "aka"}}]\n')
    found = {name: doctor_selftest.find_model(Scene(home), name) for name in ("aka", "mine")}
    assert found["aka"].source == str(tmp_path)
    assert found["mine"].folder == home.root / "models/mine"
    assert found["mine"].public_name == "a folder"
    with pytest.raises(UnknownModel, match="on this machine"):
        doctor_selftest.find_model(Scene(home), "some/model")
