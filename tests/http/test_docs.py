"""`docs/http.md` describes everything, and its examples run against the embedded model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import fields

import kvd.http.errors
from kvd.config.config import parse
from kvd.config.http import DEFAULT_PORT, HttpSettings
from kvd.http.messages_api.routes import MessagesRoutes
from kvd.http.ollama_api.routes import OllamaRoutes
from kvd.http.requests import UNSUPPORTED, ChatRequest, CompletionRequest, Message
from kvd.http.responses import Extension
from kvd.http.responses_api.requests import ResponsesRequest
from kvd.http.responses_api.routes import ResponsesRoutes
from kvd.http.routes import OPEN_PATHS, Routes
from kvd.http.ui import files
from tests.http.live import Live
from tests.pages import ROOT

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
SECURITY = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def rows(text: str) -> set[str]:
    """Return the names in the first cells of the tables."""
    return {name for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in names(row)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_field_of_a_request_is_described():
    known = {f.encode_name for kind in (ChatRequest, CompletionRequest) for f in fields(kind)}
    refused = section("Requests").partition("Not supported")[2]
    assert names(refused) >= UNSUPPORTED.keys()
    assert rows(section("Requests")) == known - UNSUPPORTED.keys()
    assert {"role", "content"} <= {f.encode_name for f in fields(Message)}


def test_the_tests_that_the_tables_name_exist():
    named = set(re.findall(r"`(?:\S+::)?(test_[a-z0-9_]+)`", PAGE))
    folder = Path(__file__).parents[1]
    texts = [file.read_text() for file in folder.rglob("test_*.py")]
    found = {name for text in texts for name in re.findall(r"def (test_[a-z0-9_]+)\(", text)}
    assert len(named) > 30
    assert named <= found, named - found


def test_every_field_of_a_response_request_is_described():
    assert rows(section("Responses API")) == {f.encode_name for f in fields(ResponsesRequest)}


def test_every_key_of_the_answers_is_described():
    assert rows(section("Answers")) == {f.encode_name for f in fields(Extension)}


def test_every_setting_is_described_with_its_default():
    table = re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", section("Configuration"), re.MULTILINE)
    described = {name: default.strip("`") for name, default in table}
    for field in fields(HttpSettings):
        default = HttpSettings().__getattribute__(field.name)
        if field.name == "port":
            assert described.pop("port") == str(DEFAULT_PORT)
        else:
            shown = default if isinstance(default, float) else json.dumps(default)
            assert described.pop(field.name) == (f"{shown:g}" if shown is default else shown)
    assert described == {}
    (example,) = blocks("toml")
    assert parse(example).http.port == tomllib.loads(example)["http"]["port"]


def test_every_client_has_a_test_that_exists():
    sources = Path(__file__).parent.rglob("test_*.py")
    known = {name for path in sources for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    found = re.findall(r"^\| .* \| (.*) \|$", section("Clients"), re.MULTILINE)[2:]
    assert len(found) > 20
    for tests in found:
        files = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        names = re.findall(r"`(test_\w+)`", tests)
        assert files or names, tests
        assert all((ROOT / path).is_file() for path in files), tests
        assert set(names) <= known, tests


def test_every_error_is_described():
    codes = names(section("Errors"))
    for code, form in kvd.http.errors._FORMS.items():
        if code not in {"frame_too_large", "slow_reader"}:  # errors of the protocol only
            reported = form.code or code
            assert reported in codes, code
            (row,) = [one for one in section("Errors").splitlines() if f"`{reported}`" in one]
            assert row.startswith(f"| {form.status} |")


def test_every_path_is_described():
    paths = {
        route.path
        for kind in (Routes, MessagesRoutes, OllamaRoutes, ResponsesRoutes)
        for route in kind.table(object.__new__(kind))
    }
    assert {path.replace("{id:.+}", "{id}") for path in paths} == described_paths()
    for path in OPEN_PATHS - files.PATHS:
        assert f"`{path}`" in SECURITY


def described_paths() -> set[str]:
    table = PAGE.partition("| path | |")[2].partition("\n\n")[0]
    found = re.findall(r"`(?:GET |POST |DELETE )?(/[^`]*)`", table.replace("`, `", "` `"))
    others = {"/metrics", "/tokenize", *OPEN_PATHS}
    return {path for path in found if path in others or path.startswith(("/v1/", "/api/"))}


# -- its examples ------------------------------------------------------------------------------

CURLS = [
    one
    for block in blocks("sh")
    for one in re.findall(r"^curl .*?(?=^curl|\Z)", block, re.DOTALL | re.MULTILINE)
]


def here(text: str, demo: Live) -> str:
    text = text.replace("http://127.0.0.1:11711", demo.url)
    return re.sub(r"(~|/home/you)/\.kvd/http\.sock", str(demo.home.http_socket), text)


@pytest.mark.mlx
@pytest.mark.parametrize("command", CURLS, ids=lambda c: c.partition("\n")[0][:60])
def test_the_curls_run(demo: Live, command):
    said = subprocess.run(
        [*shlex.split(here(command, demo)), "-sS", "--fail-with-body"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 0, said.stderr + said.stdout
    assert "demo" in said.stdout
    if "stream" in command:
        assert said.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.mlx
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split()[1])
def test_the_programs_run(demo: Live, code):
    said = subprocess.run(
        [sys.executable, "-c", here(code, demo)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.split()
