"""The distribution: three packages, all ours, one version."""

from __future__ import annotations

import importlib
import plistlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvd

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvd", "actors", "protocol")


@pytest.mark.parametrize("name", PACKAGES)
def test_the_names_are_ours_and_no_other_distribution_took_them(name):
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == ROOT / name


def test_the_names_are_ours_from_any_folder(tmp_path):
    code = f"import {', '.join(PACKAGES)}; print(kvd.__file__, actors.__file__, protocol.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(ROOT / name / "__init__.py") for name in PACKAGES]


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvd.__version__


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_three_packages(tmp_path):
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        build = ["uv", "build", "--wheel", "--out-dir", str(tmp_path), str(ROOT)]
    else:
        build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"kvd-{kvd.__version__}.dist-info"
    assert tops == {*PACKAGES, info}
    assert f"{info}/licenses/LICENSE" in names
    for needed in ("kvd/cli/app.py", "kvd/worker/__main__.py", "kvd/demo/config.json"):
        assert needed in names
    assert any(name.endswith(".safetensors") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


KEYS = {
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": int,
    "SoftResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
"""Of launchd.plist(5), those that we use, with their types."""


def test_the_launchd_agent():
    from kvd.config import Config

    file = ROOT / "deploy/launchd/dev.kvd.kvd.plist"
    agent = plistlib.loads(file.read_bytes())
    assert {key: type(value) for key, value in agent.items()} == KEYS
    assert agent["Label"] == file.stem
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ProcessType"] == "Interactive"
    assert agent["ExitTimeOut"] > Config().drain_timeout_s
    assert agent["Umask"] == 0o077
    paths = [agent["ProgramArguments"][0], agent["WorkingDirectory"]]
    paths += [agent["StandardOutPath"], agent["StandardErrorPath"]]
    assert all(path.startswith("/") for path in [*paths, *agent["EnvironmentVariables"].values()])
    assert plistlib.loads(plistlib.dumps(agent)) == agent


def test_the_launchd_page_leaves_no_placeholder():
    page = (ROOT / "deploy/launchd/README.md").read_text()
    commands = re.findall(r"s\|([^|]+)\|", page)
    text = (ROOT / "deploy/launchd/dev.kvd.kvd.plist").read_text()
    for placeholder in commands:
        text = text.replace(placeholder, "/x")
    agent = plistlib.loads(text.encode())
    assert "YOU" not in str(agent)
