"""The Dockerfile: its instructions are checked, and its RUN steps run as they are written.

No image is built. Each stage is a chroot over an overlay of this machine's files, so that the steps
change nothing here. It stands in for the base image. apt-get only simulates installs, and pip only
copies uv.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "Dockerfile"
WORDS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Instruction(NamedTuple):
    word: str
    text: str
    stage: int
    """0: before the first FROM."""


def instructions() -> list[Instruction]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found: list[Instruction] = []
    for line in filter(None, (one.strip() for one in joined.splitlines())):
        word, _, text = line.partition(" ")
        stage = sum(one.word == "FROM" for one in found) + (word == "FROM")
        found.append(Instruction(word, " ".join(text.split()), stage))
    return found


def texts(word: str, stage: int | None = None) -> list[str]:
    return [one.text for one in instructions() if one.word == word and stage in {None, one.stage}]


LAST = max(one.stage for one in instructions())


def context() -> set[str]:
    """Return the tracked files that .dockerignore leaves in the build context."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = set()
    for name in filter(lambda one: (ROOT / one).is_file(), files.splitlines()):
        ignored = False
        for pattern in patterns:  # the last pattern that matches decides
            bare = pattern.removeprefix("!")
            parts = Path(name).parts
            heads = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
            tails = parts if bare.startswith("**/") else heads
            if any(fnmatch.fnmatch(one, bare.removeprefix("**/")) for one in tails):
                ignored = not pattern.startswith("!")
        if not ignored:
            kept.add(name)
    return kept


def copied() -> Iterator[tuple[list[str], str]]:
    """Yield the sources and the target of each COPY from the build context."""
    for text in texts("COPY"):
        if not text.startswith("--from="):
            *sources, target = text.split()
            yield sources, target


def test_instructions_are_known_and_images_have_versions():
    found = instructions()

    assert {one.word for one in found} <= WORDS
    assert texts("FROM") == [
        "python:${PYTHON}-slim-trixie AS build",
        "python:${PYTHON}-slim-trixie",
    ]
    assert re.fullmatch(r"PYTHON=3\.1[1-3]", texts("ARG", 0)[0])
    for word in ("ENTRYPOINT", "CMD"):
        assert json.loads(texts(word)[-1]), "without a shell, kvd gets SIGTERM as process 1"
    for text in texts("RUN"):
        if "apt-get install" in text:
            assert "apt-get update &&" in text
            assert "--no-install-recommends" in text
            assert text.endswith("rm -rf /var/lib/apt/lists/*")


def test_all_that_the_build_copies_is_in_its_context_and_nothing_else_is():
    kept = context()
    sources = [source.removeprefix("./") for found, _ in copied() for source in found]

    for source in sources:
        assert any(name == source or name.startswith(f"{source}/") for name in kept), source
    assert {name.partition("/")[0] for name in kept} == set(sources)
    assert "kvd/demo/model.safetensors" in kept
    assert "kvd/worker/native/src/module.cpp" in kept


def test_the_daemon_has_no_root_and_its_data_are_volumes():
    last = [one for one in instructions() if one.stage == LAST]
    users = [one.text for one in last if one.word == "USER"]

    assert users == ["kvd"]
    at = [one.word for one in last].index("USER")
    assert not [one for one in last[at:] if one.word == "RUN"]
    (environment,) = texts("ENV", LAST)
    assert "KVD_HOME=/data " in environment
    assert json.loads(texts("VOLUME")[0]) == ["/data", "/data/models"]
    (made,) = [text for text in texts("RUN", LAST) if "useradd" in text]
    assert "-o kvd -g kvd -m 0700 /data /data/models" in made


def test_the_health_check_asks_the_daemon(tmp_path: Path):
    (text,) = texts("HEALTHCHECK")
    command = json.loads(text.partition("CMD ")[2])
    run = [sys.executable if word == "python" else word for word in command]
    port = "KVD_PORT"

    assert command[0] == "python"
    server = (
        "import http.server as h, sys\n"
        "class A(h.BaseHTTPRequestHandler):\n"
        "  def do_GET(self): self.send_response(200 if self.path == '/health' else 404);"
        " self.end_headers()\n"
        "s = h.HTTPServer(('127.0.0.1', 0), A)\n"
        "print(s.server_port, flush=True); s.handle_request()\n"
    )
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        at = serving.stdout.readline().decode().strip()
        assert subprocess.run(run, env={**os.environ, port: at}, check=False).returncode == 0
    done = subprocess.run(run, env={**os.environ, port: at}, capture_output=True, check=False)
    assert done.returncode != 0


def can_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    script = "mkdir -p u w m && mount -t overlay overlay -o lowerdir=/,upperdir=u,workdir=w m"
    folder = Path(os.path.realpath("/tmp")) / f"kvd-mount-{os.getpid()}"
    folder.mkdir()
    try:
        command = ["unshare", "-m", "sh", "-c", script]
        return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


APT = """#!/bin/sh
# apt-get of the tests: looks for the packages, and downloads nothing.
case "$1" in
  update) exit 0 ;;
  install) shift; exec /usr/bin/apt-get --simulate install "$@" ;;
esac
exit 1
"""


PIP = """#!/bin/sh
# pip of the tests: uv is the environment's own, which saves four seconds.
[ "$*" = "install --no-cache-dir uv>=0.8,<1" ] && cp $UV /usr/local/sbin/uv
"""


class Stage:
    """The files of one stage: what its steps write is in ``upper``."""

    def __init__(self, folder: Path) -> None:
        self.upper = folder / "upper"
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True)
        self._folder = folder
        stubs = self.upper / "usr/local/sbin"
        stubs.mkdir(parents=True)
        for name, text in (("apt-get", APT), ("pip", PIP)):
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)

    def run(self, command: str, folder: str = "/", **variables: str) -> str:
        """Run a command in the stage; it must succeed."""
        (self.upper / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounts = (
            "mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root"
            " && mount --rbind /proc root/proc && mount --rbind /dev root/dev"
            ' && exec chroot root sh -c "cd $FOLDER && $COMMAND"'
        )
        # How the package index is reached.
        network = re.compile(r".*(_proxy|_CERT|_CERTS|_CERT_FILE)|(PIP|UV)_.*", re.IGNORECASE)
        kept = {key: os.environ[key] for key in os.environ if network.fullmatch(key)}
        python = str(Path(sys.base_prefix) / "bin")
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mounts],
            cwd=self._folder,
            env={"PATH": f"/usr/local/sbin:{python}:{PATH}", "HOME": "/root", **kept, **variables}
            | {"FOLDER": folder, "COMMAND": command, "UV": find_uv_bin()},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root and overlayfs")
def test_the_steps_run_and_the_entry_point_starts():
    """This is one test, because each step builds on those before it."""
    folder = Path(os.path.realpath("/tmp")) / f"kvd-image-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        build, final = Stage(folder / "build"), Stage(folder / "final")
        for name in context():
            target = build.upper / "src" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        for text in texts("RUN", 1):
            build.run(text, "/src", EXTRA="")
        (final.upper / "opt").mkdir()
        (build.upper / "opt/kvd").rename(final.upper / "opt/kvd")
        for text in texts("RUN", LAST):
            final.run(text)
        made = final.upper / "data"
        assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (10001, 0o700)
        path = f"/opt/kvd/bin:{PATH}"
        (entry,), words = json.loads(texts("ENTRYPOINT")[0]), json.loads(texts("CMD")[0])
        assert "--host" in final.run(f"{entry} {words[0]} --help", "/data", PATH=path)
        shown = final.run("kvctl service install --print", "/data", PATH=path, KVD_HOME="/data")
        assert "/opt/kvd/bin/kvd" in shown
    finally:
        shutil.rmtree(folder, ignore_errors=True)
