"""The sdist and the wheel that it builds: their files, their metadata, and kvd run from the wheel.

The wheel is installed in an empty venv, and its commands run in an empty folder as a user with an
empty home. The distribution is built once; uv and its cache make that and the install seconds.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import kvd
from kvd.host.home import Home
from tests.process.helpers import Daemon, wait_for

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvd", "actors", "protocol")
INFO = f"mlx_kvd-{kvd.__version__}.dist-info"
SUPPORTED = ("3.11", "3.12", "3.13")
LOAD_S = 180.0
"""Time limit for a load or a command, on a machine without OpenBLAS that runs other tests too."""

Run = Callable[..., subprocess.CompletedProcess[str]]


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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tracked files, and the wheel that the sdist builds."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


FOREIGN = re.compile(r"(pip|pipx|tool) install\b[^\n`]*?\s['\"]?kvd(\[|['\"`\s]|$)", re.MULTILINE)
"""Advice to install `kvd` from an index, where it is another project."""


def test_nothing_advises_to_install_the_other_project_of_this_name():
    for old in ("pip install 'kvd[plot]'", "`pip install --upgrade kvd`", "uv tool install kvd"):
        assert FOREIGN.search(old)
    for name in sorted(tracked("kvd", "actors", "protocol", "docs", "deploy", "README.md")):
        if name.endswith((".md", ".py", ".yml", ".rb")):
            found = FOREIGN.search((ROOT / name).read_text(encoding="utf-8"))
            assert found is None, (name, found)


def tracked(*paths: str) -> set[str]:
    """Return the files of the checkout that an sdist should hold."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in found.splitlines() if (ROOT / name).exists()}


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_three_packages(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(INFO)}
        licenses = [one for one in archive.namelist() if one.startswith(f"{INFO}/licenses/")]
    assert names == tracked(*PACKAGES)
    assert {f"{name}/py.typed" for name in PACKAGES} <= names
    assert len(licenses) == 3  # kvd's, that of the embedded model's data, and uPlot's
    # The embedded model's weights are 11.5 MB; they are there for the first run without a network.
    assert wheel.stat().st_size < 13e6


@pytest.mark.slow
def test_the_sdist_holds_the_checkout(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    expected = {one for one in tracked() if not one.startswith((".github/", ".ci/"))}
    assert names == expected | {"PKG-INFO"}
    assert sdist.stat().st_size < 15e6


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())


@pytest.mark.slow
def test_the_metadata_name_the_versions_of_python(metadata: Message):
    allowed = SpecifierSet(metadata["Requires-Python"])
    classifiers = metadata.get_all("Classifier", [])
    for version in SUPPORTED:
        assert f"{version}.0" in allowed
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "3.10.14" not in allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "extra", "expected"),
    [
        ("darwin", "", {"mlx"}),
        ("darwin", "cuda", {"mlx"}),
        ("linux", "", {"mlx[cpu]", "nanobind"}),
        ("linux", "cuda", {"mlx[cpu]", "mlx[cuda13]", "nanobind"}),
    ],
)
def test_each_system_gets_its_own_build_of_mlx(metadata: Message, system, extra, expected):
    found = set()
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        where = {"sys_platform": system, "extra": extra}
        if requirement.marker is None or requirement.marker.evaluate(where):
            extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
            found.add(requirement.name + extras)
    assert {name for name in found if name.partition("[")[0] in {"mlx", "nanobind"}} == expected
    assert "matplotlib" not in found


@pytest.fixture(scope="module")
def user(wheel: Path) -> Iterator[Path]:
    """A user's folder: the venv ``venv`` with the wheel, and the empty folders ``home`` and ``w``.

    The path is short, because that of the daemon's socket is limited.
    """
    root = Path(os.path.realpath("/tmp")) / f"kvd-user-{os.getpid()}"
    root.mkdir(mode=0o700)
    (root / "home").mkdir(mode=0o700)
    (root / "w").mkdir()
    try:
        uv = [sys.executable, "-m", "uv"]
        venv = str(root / "venv")
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", f"{venv}/bin/python", str(wheel)]
        subprocess.run(install, check=True)
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def environment(user: Path) -> dict[str, str]:
    """The user's environment: nothing of this process, except where native operations are built."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return {
        "HOME": str(user / "home"),
        "LANG": "C.UTF-8",
        "PATH": f"{user / 'venv/bin'}:/usr/local/bin:/usr/bin:/bin",
        "XDG_CACHE_HOME": cache,
    }


@pytest.fixture(scope="module")
def run(user: Path, environment: dict[str, str]) -> Run:
    """A function that runs a command in the empty folder."""

    def command(line: str, **options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=user / "w",
            env=environment,
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            check=False,
            **options,
        )

    return command


class Installed(Daemon):
    """The daemon of the installed wheel."""

    def __init__(self, user: Path, environment: dict[str, str]) -> None:
        super().__init__(Home(user / "home/.kvd"))
        self._user = user
        self._environment = environment

    def launch(self, *more: str) -> subprocess.Popen[str]:
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                ["kvd", "serve", "--model", "demo", "--port", "0", *more],
                executable=self._user / "venv/bin/kvd",
                cwd=self._user / "w",
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        return self.process


@pytest.fixture(scope="module")
def served(user: Path, environment: dict[str, str]) -> Iterator[Installed]:
    """``kvd serve`` of the wheel."""
    daemon = Installed(user, environment)
    try:
        daemon.start()
        wait_for("demo is ready", lambda: "serves demo" in daemon.output.read_text(), LOAD_S)
        yield daemon
    finally:
        daemon.end()


pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("kvctl --version", kvd.__version__),
        ("kvctl --help", "Models and memory"),
        ("kvctl service install --print", "/venv/bin/"),
        ("kvctl config", "budget"),
    ],
)
def test_commands_of_the_wheel_work_without_a_daemon(run: Run, user: Path, line, shown):
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert str(ROOT) not in done.stdout
    assert not [*(user / "w").iterdir()]


@pytest.mark.slow
@pytest.mark.mlx
def test_the_wheel_serves_its_embedded_model(run: Run, served: Installed, user: Path):
    """This is one test, because the daemon's start takes longer than all commands."""
    for line, shown in (
        ("kvctl status", "demo"),
        ("kvctl generate demo 'To open a file,' --max-tokens 8 --temperature 0", ""),
        ("echo Hello! | kvctl chat demo --max-tokens 8", ""),
        ("kvctl explain demo --ctx 2k", "2,048"),
        ("kvctl metrics", "kvd_models"),
        ("kvctl launch claude --model demo --print", "ANTHROPIC_BASE_URL"),
        ("kvctl bench --trace alone --seconds 8", "tokens per second"),
        ("kvctl doctor", "ok"),
    ):
        done = run(line)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout.strip(), line
        assert shown in done.stdout, (line, done.stdout)
    worker = Path(f"/proc/{served.worker_pid('demo')}/maps")
    if worker.exists():
        assert str(user / "venv") in worker.read_text()
        assert str(ROOT) not in worker.read_text()
    assert run("kvctl shutdown").returncode == 0
    assert served.wait() == 0
    assert not [*(user / "w").iterdir()]
