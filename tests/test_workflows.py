"""The workflows run what there is: targets of make, commands of kvctl, options that they have."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TESTS = ROOT / ".github/workflows/tests.yml"
EVERYWHERE = {"curl", "unshare"}
"""Programs of every machine that runs workflows."""


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def commands(path: Path) -> list[list[str]]:
    """Return what is run, with expressions of GitHub's as one word."""
    lines = [
        line
        for job in jobs(path).values()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "EXPRESSION", line)) for line in lines]


def test_there_are_some():
    assert {path.stem for path in WORKFLOWS} >= {"tests", "selftest"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_they_are_bounded_and_may_only_read(path: Path):
    whole = yaml.safe_load(path.read_text())
    assert whole["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert 0 < job["timeout-minutes"] <= 60
        systems = job["strategy"]["matrix"]
        named = systems.get("os") or [one["os"] for one in systems["include"]]
        assert {"ubuntu-latest", "macos-latest"} <= set(named)
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_they_run_exists(path: Path):
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(path):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
            for setting in words[2:]:
                assert re.search(rf"^{setting.partition('=')[0]} \?=", makefile, re.MULTILINE)
        elif words[0] == "kvctl":
            page = [sys.executable, "-m", "kvd.cli", words[1], "--help"]
            done = subprocess.run(page, capture_output=True, text=True, check=True)
            for option in (word for word in words if word.startswith("--")):
                assert option in done.stdout
        else:
            assert words[0] in {"sudo", "python", "cat"}


def test_no_test_is_skipped_for_want_of_a_program():
    """Tests that find no program are skipped: where all is run they are there."""
    packages = {
        "g++": "g++",
        "plistutil": "libplist-utils",
        "prometheus": "prometheus",
        "promtool": "prometheus",
        "systemd-analyze": "systemd",
    }
    (installed,) = [
        words for words in commands(TESTS) if words[:3] == ["sudo", "apt-get", "install"]
    ]
    for path in (ROOT / "tests").rglob("*.py"):
        for program in re.findall(r'which\("([^"]+)"\) is None', path.read_text()):
            assert packages.get(program, program) in {*installed, *EVERYWHERE}, path
    assert {*packages.values()} <= {*installed}


def test_types_are_checked_alike_on_every_system():
    """On macOS mypy calls what is for Linux alone unreachable, and an error."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["platform"] == "linux"
