"""Advice that kvctl adds to errors."""

from __future__ import annotations

import pytest

from kvd.cli.hints import hints
from protocol.errors import Overloaded, UnknownModel, UnknownOp
from protocol.model_source import unknown_model, unknown_source


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "phi").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("phi", "it is a folder: `kvctl load ./phi` loads it as phi"),
        ("models/qwen", "it is a folder: `kvctl load models/qwen` loads it as qwen"),
        ("./models/qwen/", "it is a folder: `kvctl load ./models/qwen/` loads it as qwen"),
        ("./none", "there is no folder ./none"),
        ("~/none", "there is no folder ~/none"),
        ("/none/at/all", "there is no folder /none/at/all"),
        ("org/name", None),
        ("name", None),
        ("a" * 5000, None),
        ("~nobody-here/x\0", None),
    ],
)
def test_a_path_in_place_of_a_model_is_looked_up(name, hint):
    assert list(hints(unknown_model(name, ["demo"], []))) == ([hint] if hint else [])


def test_a_source_that_is_no_folder():
    error = UnknownModel("cannot get models/none from the Hub", source="models/none")
    assert list(hints(error)) == ["there is no folder models/none"]
    assert list(hints(unknown_source("none"))) == []
    error = UnknownModel("there is no folder /none", source="/none")
    assert list(hints(error)) == [], "the message names it already"


def test_other_hints():
    assert list(hints(Overloaded("full", retry_after_s=2))) == ["try again in 2 s"]
    assert len(list(hints(UnknownOp("no op x")))) == 1
