"""README's commands and examples, run as a reader would, with the embedded model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.cli.agents import AGENTS
from kvd.config import config
from kvd.host.home import Home
from tests.pages import blocks, commands_of
from tests.process.helpers import Daemon, lines_of, wait_for, write_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LOAD_S = 180.0
"""Time limit for a load or a command, on a machine without OpenBLAS that runs other tests too."""

pytestmark = [pytest.mark.mlx, pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon as `make run` starts it, with the model `demo`."""
    root = Path(os.path.realpath("/tmp")) / f"kvd-readme-{os.getpid()}"
    root.mkdir(mode=0o700)
    # Another daemon may use the port that the page names.
    home = write_config(Home(root / ".kvd"), "[http]\nport = 0\n")
    daemon = Daemon(home, "--model", "demo")
    try:
        daemon.start()
        wait_for("demo is ready", lambda: "serves demo" in daemon.output.read_text(), LOAD_S)
        yield daemon
    finally:
        daemon.end()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def environment(served: Daemon) -> dict[str, str]:
    """A reader's environment: the daemon's home is ``~/.kvd``, and the venv is activated."""
    found = dict(os.environ, HOME=str(served.home.root.parent))
    found.pop("KVD_HOME", None)
    # With the usual cache, native operations are not built again.
    found.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"
    return found


@pytest.fixture
def here(served: Daemon) -> Callable[[str], str]:
    """A function that replaces the page's HTTP address with the daemon's."""
    with served.client() as kvd:
        (address,) = (one for one in kvd.status().http if one.startswith("http://"))
    return lambda text: text.replace("http://127.0.0.1:11711", address)


@pytest.fixture
def shell(environment, here):
    """A function that runs a command as a reader would."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", here(line)],
            env=environment,
            input="Hello!\n/exit\n",
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            check=False,
        )

    return run


def commands() -> list[str]:
    found = [one for language, text in BLOCKS if language == "sh" for one in commands_of(text)]
    return [one for one in found if not one.startswith(("make", "kvctl launch"))]


def test_launch_knows_the_agents():
    """They are not installed here; `tests/http/test_launch.py` starts stand-ins."""
    lines = [line for _, text in BLOCKS for line in text.splitlines() if "kvctl launch" in line]
    assert {line.split()[2] for line in lines} <= AGENTS.keys()
    assert len(lines) == 3


def test_the_two_make_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    lines = [line for _, text in BLOCKS for line in text.splitlines() if line.startswith("make")]
    assert lines == ["make run", "make test"]
    for line in lines:
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE)
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")


def test_there_are_commands_to_run():
    assert len(commands()) >= 12
    assert sum(one.startswith("curl") for one in commands()) >= 4


def test_all_commands_work_in_order(shell):
    """This is one test, because each command builds on those before it."""
    for line in commands():
        if line.startswith("curl") and shutil.which("curl") is None:
            continue
        done = shell(line)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout or "unload" in line or "no events so far" in done.stderr, line
        if '"tools"' in line:
            (shown,) = re.findall(r'`("function":\{.*)`', README)
            assert shown in done.stdout


@pytest.mark.parametrize("page", ["operations", "metrics", "security"])
def test_commands_of_other_pages_work_too(page: str, shell):
    """Run the commands that talk to the daemon, then the page's commands that undo settings.

    With an API key configured, the daemon would refuse the examples of the tests that follow.
    """
    content = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = [
        command
        for language, text in blocks(content)
        if language == "sh"
        for command in commands_of(text)
        if re.match(r"(kvctl (?!service)|curl )", command)
    ]
    assert found
    for command in found:
        if not command.startswith("curl") or shutil.which("curl") is not None:
            done = shell(command)
            assert done.returncode == 0, (command, done.stderr)
            assert done.stdout, command
    for command in re.findall(r"`(kvctl config unset [^`]+)`", content):
        done = shell(command)
        assert done.returncode == 0, (command, done.stderr)


def test_the_example_of_the_protocol_page_gets_the_answer_shown(served: Daemon):
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    asked = re.search(r"^\$ printf '(.*)\\n' \|", page, re.MULTILINE)
    reported = re.search(r'^\{"event":"hello".*\}$', page, re.MULTILINE)
    assert asked is not None
    assert reported is not None
    with served.connect() as raw:
        raw.sendall(asked[1].encode() + b"\n")
        answer = next(lines_of(raw))
    shown = json.loads(reported[0])
    assert answer.keys() == shown.keys()
    assert (answer["event"], answer["protocol"]) == (shown["event"], shown["protocol"])


def test_the_welcome_names_commands_that_work(served: Daemon, shell):
    welcome = served.output.read_text()
    tries = re.findall(r"(\S*kvctl .*)", welcome)
    assert len(tries) == 3
    for line in tries:
        done = shell(line)
        assert (done.returncode, bool(done.stdout)) == (0, True), (line, done.stderr)


def test_status_has_what_the_page_promises(shell):
    status = json.loads(shell("kvctl status --json").stdout)
    (demo,) = [model for model in status["models"] if model["name"] == "demo"]
    assert demo["state"] == "ready"
    assert demo["info"]["kv_scheme"] == "k8v8"
    assert demo["info"]["attention_path"]
    assert demo["stats"]["memory"]["weights"] > 0
    assert demo["stats"]["memory"]["footprint"] > 0
    assert demo["granted_bytes"] <= status["budget_bytes"]


@pytest.mark.parametrize(
    ("library", "shown"), [("openai", ""), ("pydantic", "mood="), ("kvd.client", "Done(")]
)
def test_the_python_examples_run(library: str, shown: str, environment, here):
    pytest.importorskip(library)
    example, *_ = [
        text for language, text in BLOCKS if language == "python" and f"from {library} " in text
    ]
    done = subprocess.run(
        [sys.executable, "-c", here(example)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LOAD_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert shown in done.stdout


def test_the_configuration_example_is_valid():
    (example,) = [text for language, text in BLOCKS if language == "toml"]
    assert tomllib.loads(example)
    parsed = config.parse(example)
    assert parsed.budget_bytes == 8 * 2**30
    assert [entry.source for entry in parsed.entries] == ["demo", "/models/qwen3"]
