"""The distribution has one version and three packages, which are those of this repository."""

from __future__ import annotations

import importlib
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
def test_packages_are_those_of_this_repository(name):
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == ROOT / name


def test_packages_are_those_of_this_repository_in_any_folder(tmp_path):
    code = f"import {', '.join(PACKAGES)}; print(kvd.__file__, actors.__file__, protocol.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(ROOT / name / "__init__.py") for name in PACKAGES]


def test_there_is_one_version():
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
    info = f"mlx_kvd-{kvd.__version__}.dist-info"
    assert tops == {*PACKAGES, info}
    assert f"{info}/licenses/LICENSE" in names
    for needed in ("kvd/cli/app.py", "kvd/worker/__main__.py", "kvd/demo/config.json"):
        assert needed in names
    assert any(name.endswith(".safetensors") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
