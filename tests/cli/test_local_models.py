"""Models in folders and in the Hub's cache, and `kvctl models`."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from kvd.cli import completion, local_models, models
from kvd.demo import path as demo
from kvd.host.home import Home
from kvd.host.models_dir import ModelsDir
from protocol import messages as m
from protocol.errors import InvalidModel
from protocol.explain_messages import Explain, Explained
from protocol.forecast import Forecast, LevelCost
from tests.cli.stub import stub_daemon, well


def model_at(folder: Path, *sizes: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for number, size in enumerate(sizes):
        (folder / f"model-{number}.safetensors").write_bytes(b"x" * size)
    return folder


def sources(incomplete: str) -> list[str]:
    return completion.model_sources(None, None, incomplete)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def test_folders_are_searched_but_not_inside_models(tmp_path):
    model_at(tmp_path / "a", 3, 4)
    model_at(tmp_path / "owner" / "b", 5)
    model_at(tmp_path / "owner" / "b" / "inner", 5)
    model_at(tmp_path / ".hidden", 5)
    model_at(tmp_path / "1" / "2" / "3" / "4", 5)
    found = local_models.in_folder(tmp_path)
    assert [(Path(one.source).name, one.weights_bytes) for one in found] == [("a", 7), ("b", 5)]
    assert local_models.in_folder(tmp_path / "a")[0].complete
    assert local_models.in_folder(tmp_path / "nowhere") == []


def test_the_hub_s_cache_gives_each_model_s_main_snapshot(hub):
    model_at(hub / "models--org--name--x" / "snapshots" / "old", 1)
    model_at(hub / "models--org--name--x" / "snapshots" / "new", 2)
    refs = hub / "models--org--name--x" / "refs"
    refs.mkdir()
    (refs / "main").write_text("old\n")
    broken = model_at(hub / "models--org--part" / "snapshots" / "s", 2)
    (broken / "model-9.safetensors").symlink_to("../../blobs/nothing")
    model_at(hub / "models--org--bare" / "snapshots" / "s")
    model_at(hub / "datasets--org--data" / "snapshots" / "s", 2)
    (hub / "models--org--empty").mkdir()
    found = {one.source: (one.weights_bytes, one.complete) for one in local_models.in_hub_cache()}
    assert found == {
        "org/name/x": (1, True),
        "org/part": (2, False),
        "org/bare": (0, False),
    }
    assert sources("org/n") == ["org/name/x"]


def test_the_cache_folder_follows_the_hub_s_environment_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "c"))
    assert local_models.hub_cache() == tmp_path / "c"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert local_models.hub_cache() == tmp_path / "x" / "huggingface" / "hub"
    assert local_models.in_hub_cache() == []


def test_a_shell_completes_folders(tmp_path):
    model_at(tmp_path / "qwen", 1)
    (tmp_path / "file").touch()
    assert sources(f"{tmp_path}/") == [f"{tmp_path}/qwen"]
    assert sources("de") == ["demo"]


def forecast(model, verdict):
    level = LevelCost(scheme="k4v4", token_bytes=1.0, row_bytes=1, total_bytes=3 << 30, max_rows=0)
    return Forecast(
        model=model, source=model, state="not loaded", measured=False, context=4096, rows=1,
        weights_bytes=1, base_bytes=1, idle_bytes=1, levels=[level], budget_bytes=2 << 30,
        available_bytes=1, held_bytes=0, missing_bytes=0, steps=[], shortfall_bytes=0,
        verdict=verdict,
    )  # fmt: skip


def test_each_model_is_listed_with_the_daemon_s_forecast(
    kvctl, home: Home, hub, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")  # so that the folder's path fits into the table
    model_at(hub / "models--org--big" / "snapshots" / "s", 9)
    model_at(hub / "models--org--odd" / "snapshots" / "s", 9)
    model_at(hub / "models--org--part" / "snapshots" / "s")
    model_at(tmp_path / "mine", 5)
    explained = []

    def answer(request):
        if not isinstance(request, Explain):
            yield from well(request)
            return
        explained.append((request.model, request.rows, request.context))
        if request.model.endswith("models--org--odd/snapshots/s"):
            error = InvalidModel("its config.json is [empty]")
            yield m.Error(id=request.id, error=error.info())
        else:
            verdict = "fits" if request.model == "demo" else "never"
            yield Explained(id=request.id, forecast=forecast(request.model, verdict))

    with stub_daemon(home.socket, answer):
        code, out, err = kvctl("models", str(tmp_path / "mine"), "--ctx", "100", "--json")
        page = kvctl("models", str(tmp_path / "mine"))[1]
    assert (code, err) == (0, "")
    found = {one["source"]: one for one in json.loads(out)}
    assert list(found) == ["demo", str(tmp_path / "mine"), "org/big", "org/odd", "org/part"]
    assert found["demo"]["loaded_as"] == ["demo"]
    assert found["org/big"]["forecast"]["verdict"] == "never"
    assert found["org/odd"]["error"]["code"] == "invalid_model"
    assert "forecast" not in found["org/part"]
    assert {one[1:] for one in explained} == {(1, 100), (1, 4096)}
    assert not any("part" in model for model, _, _ in explained)
    for text in (
        "never: 3.0 GiB of 2.0 GiB",
        "its config.json is [empty]",
        "not completely downloaded",
    ):
        assert text in page


def test_without_a_daemon_the_forecast_is_for_a_new_daemon(kvctl, home: Home, hub):
    home.create()
    home.config.write_text('budget = "1GiB"')
    code, out, err = kvctl("models", "--json")
    assert (code, "no daemon runs" in err) == (0, True)
    (found,) = json.loads(out)
    assert found["path"] == str(demo())
    assert found["forecast"]["verdict"] == "fits"
    assert found["forecast"]["budget_bytes"] == 1 << 30
    home.config.write_text('budget = "64MiB"')
    (found,) = json.loads(kvctl("models", "--json")[1])
    assert found["forecast"]["verdict"] == "never"


@pytest.mark.parametrize("width", [72, 76, 80, 160])
def test_the_table_fits_its_width(width):
    long = local_models.LocalModel("/" + "long/" * 30, "folder", Path("/"), 5, complete=True)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    odd = local_models.LocalModel("/[red]x", "folder", Path("/"), 5, complete=True)
    forecasts = [forecast("m", verdict) for verdict in ("waits", "never")]
    candidates = [
        models.Candidate(long, ("a", "b"), "unloaded", "k8v8", forecast) for forecast in forecasts
    ]
    candidates.append(models.Candidate(odd, forecast=forecasts[0]))
    broken = local_models.LocalModel(
        "broken", "models_dir", Path("/"), 0, complete=False, problem="/a/models/broken has none"
    )
    candidates.append(models.Candidate(broken))
    console.print(models.page(candidates))
    assert max(map(len, console.file.getvalue().splitlines())) <= width
    assert "/[red]x" in console.file.getvalue()
    text = console.file.getvalue()
    assert "broken: /a/models/broken has none" in text
    (head, *lines) = text.splitlines()
    verdicts = "".join("".join(line[head.index("FITS") :].split()) for line in lines)
    assert "hastowait" in verdicts, "no letter may be lost"


def test_folders_whose_names_cannot_be_printed_are_not_listed(kvctl, home: Home, hub):
    try:
        model_at(home.root / "models" / os.fsdecode(b"caf\xe9"), 1)
    except OSError:
        pytest.skip("the file system refuses this name")
    code, out, err = kvctl("list", "--json")
    assert (code, [one["source"] for one in json.loads(out)]) == (0, ["demo"]), err


def test_the_list_shows_downloads_and_what_only_looks_like_one(tmp_path):
    part = tmp_path / ".pull-part"
    part.mkdir()
    (part / "x.part").write_bytes(b"123")
    (part / "outline").mkdir()
    (part / "gone").symlink_to("nothing")
    (tmp_path / ".pull-file").touch()
    found = local_models.in_models_dir(ModelsDir(tmp_path))
    assert [(one.source, one.weights_bytes) for one in found] == [("file", 0), ("part", 3)]
