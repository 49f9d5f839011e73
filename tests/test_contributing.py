"""The recipes of CONTRIBUTING name files that exist."""

from __future__ import annotations

import re

import pytest

from tests.pages import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^### (Add .*?)$(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


def test_there_is_a_recipe_for_each_usual_change():
    assert [title for title, _ in RECIPES] == [
        "Add an HTTP endpoint",
        "Add a socket operation",
        "Add a command to kvctl",
        "Add a setting",
        "Add a metric",
        "Add a reclaim method",
        "Add a cache kind",
        "Add a KV bit width",
    ]


@pytest.mark.parametrize(("title", "text"), RECIPES, ids=[title for title, _ in RECIPES])
def test_a_recipe_names_files_that_exist(title: str, text: str):
    paths = PATH.findall(text)

    assert len(paths) >= 3
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_all_files_that_contributing_names_exist():
    assert not [path for path in PATH.findall(PAGE) if not (ROOT / path).exists()]


def test_each_package_has_tests_that_make_can_run():
    named = re.findall(r"`?make test-(\w+)", PAGE)

    assert {"scheduling", "cache", "protocol", "http"} <= set(named)
    for name in set(named) - {"NAME"}:
        assert (ROOT / "tests/worker" / name).is_dir() or (ROOT / "tests" / name).is_dir()
