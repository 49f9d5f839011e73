"""The models folder: which of its folders are models, by which names, and why others are not."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from kvd.host.models_dir import ModelsDir
from protocol.errors import InvalidModel, KvdError


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def model_at(path: Path) -> Path:
    """Make a whole model of few bytes: the weights are one tensor."""
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"num_hidden_layers": 1}')
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"1234"
    (path / "model.safetensors").write_bytes(data)
    return path


def problem(folder: Path, name: str) -> str:
    (found,) = [one for one in ModelsDir(folder).scan() if one.name == name]
    return found.problem


def test_each_folder_is_a_model_by_its_name(folder):
    for name in ("qwen", "Qwen3-0.6B_4bit", "b.v1"):
        model_at(folder / name)
    (folder / "notes.txt").touch()
    found = ModelsDir(folder).scan()
    assert [(one.name, one.problem) for one in found] == [
        ("Qwen3-0.6B_4bit", ""),
        ("b.v1", ""),
        ("qwen", ""),
    ]
    assert ModelsDir(folder).find("qwen") == folder / "qwen"
    assert ModelsDir(folder).find("QWEN") is None
    assert ModelsDir(folder).find("notes.txt") is None


@pytest.mark.parametrize("name", [b"x\x1b[2J", b"caf\xe9", b"a\nb"])
def test_names_that_cannot_be_printed_are_no_models(folder, name: bytes):
    try:
        model_at(folder / os.fsdecode(name))
    except OSError:
        pytest.skip("the file system refuses this name")
    assert ModelsDir(folder).scan() == []


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_without_a_folder_there_are_no_models(tmp_path, path):
    models = ModelsDir(path and tmp_path / path)
    assert models.scan() == []
    assert models.find("a") is None


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/", ".", "..", "", "a/inner", "x" * 5000, "a\0b"]
)
def test_only_entries_of_the_folder_are_names(folder, name):
    model_at(folder.parent / "outside")
    model_at(folder / "a" / "inner")
    assert ModelsDir(folder).find(name) is None
    assert ModelsDir(folder).find(str(folder.parent / "outside")) is None


def test_hidden_folders_are_no_models(folder):
    model_at(folder / ".hidden")
    assert ModelsDir(folder).scan() == []
    assert ModelsDir(folder).find(".hidden") is None


def test_links_must_stay_in_the_folder(folder):
    outside = model_at(folder.parent / "outside")
    (folder / "link").symlink_to(outside)
    (folder / "hop").symlink_to("link")
    model_at(folder / "real")
    (folder / "inside").symlink_to("real")
    (folder / "loop").symlink_to("loop")
    models = ModelsDir(folder)
    assert "is a link out of" in problem(folder, "link")
    assert "is a link out of" in problem(folder, "hop")
    for name in ("link", "hop"):
        with pytest.raises(InvalidModel, match="is a link out of"):
            models.find(name)
    assert models.find("loop") is None
    assert models.find("inside") == folder / "inside"


def test_names_that_requests_cannot_have_are_listed_with_the_reason(folder):
    model_at(folder / "two words")
    assert "rename the folder" in problem(folder, "two words")
    with pytest.raises(InvalidModel, match="rename the folder"):
        ModelsDir(folder).find("two words")


def test_half_pulled_and_broken_folders_are_listed_with_the_reason(folder):
    (folder / "empty").mkdir()
    (model_at(folder / "no-weights") / "model.safetensors").unlink()
    (model_at(folder / "no-json") / "config.json").write_text("{")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    half = model_at(folder / "half") / "model.safetensors.index.json"
    half.write_text(json.dumps(index))
    cut = model_at(folder / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-2])
    (folder / "gguf").mkdir()
    (folder / "gguf" / "x.gguf").touch()
    reasons = {
        "empty": "has no model*.safetensors",
        "no-weights": "has no model*.safetensors",
        "no-json": "is not valid JSON",
        "half": "model-2.safetensors is missing",
        "cut": "model.safetensors",
        "gguf": "GGUF",
    }
    for name, reason in reasons.items():
        assert reason in problem(folder, name)
        if name != "cut":  # only the scan reads headers
            with pytest.raises(KvdError, match=re.escape(reason)):
                ModelsDir(folder).find(name)


def test_names_are_looked_up_without_listing_the_folder_until_it_changes(folder, monkeypatch):
    listed, plain = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (listed.append(path), plain(path))[1])
    models = ModelsDir(folder)
    model_at(folder / "first")
    for _ in range(3):
        assert models.find("second") is None
    assert len(listed) == 3, "the time of a recent change may also be that of a later one"
    os.utime(folder, ns=(0, 10**18))
    listed.clear()
    for _ in range(100):
        assert models.find("second") is None
        assert models.find("first") == folder / "first"
    assert len(listed) == 1
    model_at(folder / "second")
    assert models.find("second") == folder / "second"
    shutil.rmtree(folder)
    assert models.find("first") is None
