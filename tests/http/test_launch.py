"""`kvctl launch` against a real daemon, with stand-ins that record how agents are started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvd.host.home import Home
from kvd.http import keys
from tests.http.live import Live, stopped
from tests.process.helpers import source, write_config

STAND_IN = """#!{python}
import json, os, sys
record = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
json.dump(record, open({record!r}, "w"))
sys.exit(7)
"""


class Bench:
    """A folder of stand-ins, and kvctl with that folder in PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder / "record.json"

    def install(self, program: str) -> None:
        path = self._folder / program
        path.write_text(STAND_IN.format(python=sys.executable, record=str(self._record)))
        path.chmod(0o755)

    def launch(self, daemon: Live, *arguments: str, **variables: str):
        path = f"{self._folder}:{Path(sys.executable).parent}"
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "kvd.cli",
                "--home",
                str(daemon.home.root),
                "launch",
                *arguments,
            ],
            env={"PATH": path, "HOME": str(self._folder), "NO_COLOR": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def record(self) -> dict:
        return json.loads(self._record.read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_claude(live: Live, bench: Bench):
    bench.install("claude")
    done = bench.launch(
        live, "claude", "--model", "fast", "--", "-p", "Hi there",
        ANTHROPIC_API_KEY="sk-ant-of-the-user", KEPT="yes",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "")
    assert bench.record["arguments"] == ["-p", "Hi there"]
    environment = bench.record["environment"]
    assert environment["ANTHROPIC_BASE_URL"] == live.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert environment["ANTHROPIC_MODEL"] == "fast"
    assert environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "fast"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "16384"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert "ANTHROPIC_API_KEY" not in environment
    assert environment["KEPT"] == "yes"
    assert "the context of fast has 16384 tokens" in done.stderr


def test_codex(live: Live, bench: Bench):
    bench.install("codex")
    done = bench.launch(live, "codex", "--model", "fast", "--", "exec", "Hi")
    assert done.returncode == 7
    *given, command, prompt = bench.record["arguments"]
    assert (command, prompt) == ("exec", "Hi")
    assert given[::2] == ["-c"] * 5
    config = tomllib.loads("\n".join(given[1::2]))
    catalogue = json.loads(Path(config.pop("model_catalog_json")).read_text())["models"]
    windows = {model["slug"]: model.get("context_window") for model in catalogue}
    assert windows["fast"] == 16384
    assert config == {
        "model": "fast",
        "model_provider": "kvd",
        "model_providers": {
            "kvd": {"name": "kvd", "base_url": f"{live.url}/v1", "wire_api": "responses"}
        },
        "model_context_window": 16384,
    }


def test_opencode(live: Live, bench: Bench):
    bench.install("opencode")
    assert bench.launch(live, "opencode", "--model", "fast").returncode == 7
    config = json.loads(bench.record["environment"]["OPENCODE_CONFIG_CONTENT"])
    assert (config["model"], config["small_model"]) == ("kvd/fast", "kvd/fast")
    provider = config["provider"]["kvd"]
    assert provider["options"] == {"baseURL": f"{live.url}/v1", "apiKey": "none"}
    assert provider["models"]["fast"]["limit"] == {"context": 16384, "output": 4096}
    assert provider["models"]["fast"]["tool_call"] is True


def test_qwen(live: Live, bench: Bench):
    bench.install("qwen")
    assert bench.launch(live, "qwen", "--model", "fast").returncode == 7
    environment = bench.record["environment"]
    assert environment["OPENAI_BASE_URL"] == f"{live.url}/v1"
    assert environment["OPENAI_MODEL"] == "fast"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux lists ignored signals")
def test_the_agent_does_not_ignore_sigpipe(live: Live, bench: Bench, tmp_path: Path):
    """Python ignores SIGPIPE, and a program inherits that unless kvctl restores the default."""
    bench.install("qwen")
    (tmp_path / "qwen").write_text(
        "#!/bin/sh\nwhile read -r one; do echo $one; done </proc/self/status\n"
    )
    shown = bench.launch(live, "qwen", "--model", "fast")
    (ignored,) = [line for line in shown.stdout.splitlines() if line.startswith("SigIgn")]
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_an_unloaded_model_is_loaded(live: Live, bench: Bench):
    bench.install("qwen")
    with live.client() as kvd:
        if "on-demand" not in kvd.status().unloaded:
            kvd.unload("on-demand")
    assert bench.launch(live, "qwen", "--model", "on-demand").returncode == 7
    assert live.model("on-demand").state == "ready"


def test_what_prevents_a_launch_is_explained(live: Live, bench: Bench):
    missing = bench.launch(live, "codex", "--model", "fast")
    assert missing.returncode == 1
    assert "`npm install -g @openai/codex` installs it" in missing.stderr
    bench.install("codex")
    unknown = bench.launch(live, "codex", "--model", "nope")
    assert unknown.returncode == 6
    assert "there is no model 'nope'" in unknown.stderr
    several = bench.launch(live, "codex")
    assert several.returncode == 6
    assert "choose a model with --model: " in several.stderr
    broken = bench.launch(live, "codex", "--model", "broken")
    assert broken.returncode == 6
    live.load(source(tps=100, tools="false"), "toolless")
    toolless = bench.launch(live, "codex", "--model", "toolless")
    assert toolless.returncode == 6
    assert "toolless cannot call tools" in toolless.stderr
    other = bench.launch(live, "emacs")
    assert other.returncode == 2
    assert not (bench._record).exists()


def test_without_a_daemon(bench: Bench, home: Home):
    bench.install("codex")
    done = bench.launch(Live(home, "--fake"), "codex")
    assert done.returncode == 3


def test_print_shows_a_command_that_starts_the_agent(live: Live, bench: Bench):
    shown = bench.launch(live, "claude", "--model", "fast", "--print", "--", "-p", "a b")
    assert shown.returncode == 0
    assert shown.stdout.startswith("env -u ANTHROPIC_API_KEY ")
    assert shown.stdout.endswith(" claude -p 'a b'\n")
    bench.install("claude")
    path = f"{bench._folder}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", shown.stdout], env={"PATH": path}, timeout=60, check=False)
    assert done.returncode == 7
    assert bench.record["environment"]["ANTHROPIC_BASE_URL"] == live.url
    data = json.loads(bench.launch(live, "claude", "--model", "fast", "--json").stdout)
    assert data["environment"]["ANTHROPIC_MODEL"] == "fast"


def test_a_key_is_checked_and_passed_on(home: Home, bench: Bench):
    bench.install("codex")
    bench.install("claude")
    key = keys.make()
    config = f'[http]\nport = 0\nkeys = {{ laptop = "{keys.hashed(key)}" }}\n'
    daemon = Live(write_config(home, config), "--fake")
    with stopped(daemon):
        daemon.start()
        daemon.load(source(tps=100), "only")
        refused = bench.launch(daemon, "codex")
        assert refused.returncode == 1
        assert "requires a key: set KVD_API_KEY" in refused.stderr
        wrong = bench.launch(daemon, "codex", KVD_API_KEY="kvd-wrong")
        assert "does not accept the key" in wrong.stderr
        assert bench.launch(daemon, "codex", KVD_API_KEY=key).returncode == 7
        provider = bench.record["arguments"][5]
        assert 'env_key = "KVD_API_KEY"' in provider
        assert key not in " ".join(bench.record["arguments"])
        assert bench.launch(daemon, "claude", KVD_API_KEY=key).returncode == 7
        assert bench.record["environment"]["ANTHROPIC_AUTH_TOKEN"] == key
        for agent, name in (("claude", "ANTHROPIC_AUTH_TOKEN"), ("opencode", "OPENCODE_CONFIG")):
            printed = bench.launch(daemon, agent, "--print", KVD_API_KEY=key).stdout
            assert key not in printed
            command = printed.partition(f" {agent}")[0]
            given = {**os.environ, "KVD_API_KEY": key}
            environment = subprocess.check_output(["sh", "-c", command], env=given, text=True)
            assert re.search(f"^{name}.*{key}", environment, re.MULTILINE)


def test_without_http_over_tcp(home: Home, bench: Bench):
    bench.install("codex")
    daemon = Live(write_config(home, "[http]\ntcp = false\n"), "--fake")
    with stopped(daemon):
        daemon.start()
        done = bench.launch(daemon, "codex")
    assert done.returncode == 3
    assert "no HTTP address" in done.stderr
