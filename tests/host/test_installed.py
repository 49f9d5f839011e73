"""The command that installs kvd again matches how it was installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvd.host import installed
from kvd.host.installed import Installation

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".toml", ".yml", ".sh", ".service", ".plist", ".svg"}
CHECKOUT = {"url": "file:///src/my%20kvd", "dir_info": {"editable": True}}
FOLDER = {"url": "file:///src/kvd", "dir_info": {}}
GIT = {"url": "https://example.org/kvd.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}}
WHEEL = {"url": "https://example.org/kvd.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("marker", "has_pip", "origin", "command"),
    [
        (None, True, {}, "/v/bin/python -m pip install 'mlx-kvd[plot]'"),
        (None, True, CHECKOUT, "/v/bin/python -m pip install -e '/src/my kvd[plot]'"),
        (None, False, CHECKOUT, "uv pip install --python /v/bin/python -e '/src/my kvd[plot]'"),
        (None, True, GIT, f"/v/bin/python -m pip install 'mlx-kvd[plot] @ git+{GIT['url']}'"),
        (None, True, WHEEL, f"/v/bin/python -m pip install 'mlx-kvd[plot] @ {WHEEL['url']}'"),
        ("uv-receipt.toml", False, {}, "uv tool install --force 'mlx-kvd[plot]'"),
        ("uv-receipt.toml", False, FOLDER, "uv tool install --force '/src/kvd[plot]'"),
        ("pipx_metadata.json", False, {}, "pipx install --force 'mlx-kvd[plot]'"),
        ("pipx_metadata.json", False, FOLDER, "pipx install --force '/src/kvd[plot]'"),
    ],
)
def test_the_command_is_that_of_the_installer(tmp_path, marker, has_pip, origin, command):
    if marker is not None:
        (tmp_path / marker).touch()
    found = Installation(tmp_path, "/v/bin/python", has_pip, origin)
    assert found.command("plot") == command


def test_this_environment_is_a_checkout():
    origin = installed.find().origin
    assert origin["dir_info"]["editable"]
    assert (
        installed.find().command("plot").endswith(f"{origin['url'].removeprefix('file://')}[plot]'")
    )


def test_a_checkout_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(installed, "DISTRIBUTION", "no-such-distribution")
    assert f"-e {ROOT}" in installed.find().command()


def test_no_text_advises_to_install_the_other_project_of_that_name():
    """`kvd` on package indexes is another project; this one is `mlx-kvd`."""
    wrong = re.compile(
        r"(?:pip|pipx|uv tool|uv|uvx|pip3) (?:install|add|run|inject|upgrade)"
        r"(?: +-{1,2}[\w-]+)* +['\"]?kvd(?![\w-])"
    )
    assert all(map(wrong.search, ("pip install kvd", "uv tool install 'kvd[plot]'")))
    assert not any(map(wrong.search, ("pip install mlx-kvd", "pip install kvd-x")))
    texts = [path for path in ROOT.glob("*.*") if path.is_file()] + [ROOT / "Makefile"]
    for folder in ("kvd", "actors", "protocol", "tools", "docs", "deploy", "bench", ".github"):
        texts += (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    assert len(texts) > 400
    for path in texts:
        assert not wrong.search(path.read_text("utf-8")), path
