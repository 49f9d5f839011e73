"""`kvctl run`, `list`, `ps`, `stop` and `rm` against a real daemon."""

from __future__ import annotations

import json
import shutil

import pytest

from kvd import demo
from kvd.cli.common import CommonOptions
from kvd.cli.pulled import Place
from kvd.cli.rm import find
from protocol.errors import UnknownModel
from tests.http.live import Live


@pytest.fixture
def mine(live: Live):
    """A model's folder as `kvctl pull org/mine` leaves it."""
    path = live.home.root / "models" / "mine"
    shutil.copytree(demo.path(), path)
    (path / ".kvd-pull.json").write_text('{"source": "org/mine", "revision": "abc"}')
    yield path
    shutil.rmtree(path, ignore_errors=True)
    with live.client() as kvd:
        if any(model.name == "mine" for model in kvd.status().models):
            kvd.unload("mine")
        kvd.reload()


def test_run_loads_a_model_answers_and_it_can_be_stopped_and_deleted(live: Live, mine):
    ran = live.kvctl("run", "org/mine", "Hi", "--max-tokens", "3", "--keep-alive", "1h")
    assert (ran.returncode, bool(ran.stdout)) == (0, True), ran.stderr

    (shown,) = [
        one for one in json.loads(live.kvctl("ps", "--json").stdout) if one["name"] == "mine"
    ]
    assert 3500 < shown["expires_in_s"] <= 3600
    line = next(line for line in live.kvctl("ps").stdout.splitlines() if line.startswith("mine"))
    assert "ready" in line
    assert "in 59m" in line or "in 1h 0m" in line

    refused = live.kvctl("rm", "mine", "--yes")
    assert (refused.returncode, "kvctl stop mine" in refused.stderr) == (6, True)
    assert live.kvctl("stop", "mine").returncode == 0
    asked = live.kvctl("rm", "mine")
    assert (asked.returncode, "--yes" in asked.stderr) == (6, True)
    assert mine.exists()
    assert live.kvctl("rm", "mine", "--yes").returncode == 0
    assert not mine.exists()
    with live.client() as kvd:
        assert "mine" not in kvd.status().unloaded


def test_run_reads_stdin_and_never_pulls_without_asking(live: Live, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    ran = live.kvctl("run", "fast", "--max-tokens", "3", "--seed", "1", input="Hi\n")
    assert (ran.returncode, bool(ran.stdout)) == (0, True)
    refused = live.kvctl("run", "org/none", "Hi")
    assert (refused.returncode, "kvctl pull org/none" in refused.stderr) == (6, True)


def test_list_shows_every_model_with_its_state(live: Live, mine):
    (mine.parent / "half").mkdir()
    staging = Place(mine.parent, "quarter").staging
    staging.mkdir()
    (staging / "x.part").write_bytes(b"abc")
    try:
        found = {one["source"]: one for one in json.loads(live.kvctl("list", "--json").stdout)}
    finally:
        (mine.parent / "half").rmdir()
        shutil.rmtree(staging)
    assert (found["mine"]["kind"], found["mine"]["state"]) == ("models_dir", "unloaded")
    assert "has no model*.safetensors" in found["half"]["problem"]
    assert "kvctl pull" in found["quarter"]["problem"]
    assert found["quarter"]["weights_bytes"] == 3
    assert found["demo"]["kind"] == "embedded"
    by_name = {name: one["state"] for one in found.values() for name in one["names"]}
    assert by_name["fast"] == "ready"
    assert by_name["broken"] == "unloaded"


@pytest.mark.parametrize(
    "name", ["../h", "/etc", ".", "..", "a/b/c", "", ".pull-x", "org/../..", "notes"]
)
def test_rm_finds_only_models_of_its_two_places(live: Live, monkeypatch, tmp_path, name: str):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnknownModel):
        find(CommonOptions(home=str(live.home.root)), name)


def test_rm_keeps_folders_that_are_no_models(live: Live, mine):
    several = mine.with_name("several")
    several.mkdir()
    shutil.copytree(mine, several / "one")
    try:
        kept = live.kvctl("rm", "several", "--yes")
        assert (kept.returncode, "yours to delete" in kept.stderr) == (6, True)
        assert (several / "one" / "config.json").exists()
        (several / "config.json").touch()  # a model without weights
        assert live.kvctl("rm", "several", "--yes").returncode == 0
        assert not several.exists()
    finally:
        shutil.rmtree(several, ignore_errors=True)


def test_rm_deletes_half_pulled_models_and_those_of_the_cache(live: Live, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    staging = Place(live.home.root / "models", "part").staging
    staging.mkdir(parents=True)
    cached = tmp_path / "models--org--x" / "snapshots" / "s"
    cached.mkdir(parents=True)
    for name in ("part", "org/x"):
        removed = live.kvctl("rm", name, "--yes")
        assert removed.returncode == 0, removed.stderr
    assert not staging.exists()
    assert list(tmp_path.iterdir()) == []


def test_rm_completes_a_deletion_that_was_killed(live: Live, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    left = [live.home.root / "models" / ".rm-gone", tmp_path / ".rm-models--org--y"]
    for name, folder in zip(("gone", "org/y"), left, strict=True):
        folder.mkdir(parents=True)
        (folder / "rest").touch()
        assert live.kvctl("rm", name, "--yes").returncode == 0
        assert not folder.exists()


def test_a_link_is_deleted_and_not_its_target(live: Live, mine):
    link = mine.with_name("link")
    link.symlink_to("mine")
    assert live.kvctl("rm", "link", "--yes").returncode == 0
    assert not link.is_symlink()
    assert (mine / "config.json").exists()
