"""tokenize, config, completion and chat against a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import pytest

from kvd import cli
from kvd.host.home import Home
from protocol.errors import (
    ConfigError,
    Draining,
    EmptyPrompt,
    InvalidModel,
    InvalidRequest,
    UnknownModel,
    WorkerDied,
)
from tests.process.helpers import DEADLINE_S, Daemon, source, wait_for, write_config


def test_tokenize_for_people_and_for_programs(shared: Daemon):
    assert shared.kvctl("tokenize", "fast", "Hi!").stdout == "72\t'H'\n105\t'i'\n33\t'!'\n"
    assert shared.kvctl("tokenize", "fast", "Grüße", "--count").stdout == "7\n"
    listed = json.loads(shared.kvctl("tokenize", "fast", "-", "--json", input="ab").stdout)
    assert listed == {"count": 2, "tokens": [97, 98], "texts": ["a", "b"]}
    chat = json.loads(shared.kvctl("tokenize", "fast", "ab", "--chat", "-c", "--json").stdout)
    assert chat == {"count": len("user: ab\n")}
    assert shared.kvctl("tokenize", "nope", "Hi").returncode == 6


def test_tokens_beyond_the_limit_are_counted(shared: Daemon):
    with shared.client() as client:
        reply = client.tokenize("fast", "x" * 20_000, limit=3)
        assert (reply.count, reply.tokens, reply.texts) == (20_000, [120] * 3, [])
        with pytest.raises(EmptyPrompt):
            client.tokenize("fast", "")
        with pytest.raises(InvalidRequest):
            client.tokenize("fast")
        with pytest.raises(UnknownModel):
            client.tokenize("nope", "Hi")


def test_tokenize_loads_an_unloaded_model(make_daemon, home: Home):
    write_config(home, f'[[models]]\nsource = "{source()}"\nalias = "lazy"\nload = "demand"\n')
    daemon = make_daemon().start()
    with daemon.client() as client:
        assert client.status().unloaded == ["lazy"]
        assert client.tokenize("lazy", "four", limit=0).count == 4
        assert client.status().unloaded == []


def test_tokenize_fails_for_a_broken_model_and_while_draining(make_daemon, home: Home):
    broken = source(load_error="invalid_model")
    write_config(home, f'[[models]]\nsource = "{broken}"\nalias = "broken"\nload = "demand"\n')
    daemon = make_daemon().start()
    daemon.load(source(), "m")
    with daemon.client() as client:
        with pytest.raises(InvalidModel):
            client.tokenize("broken", "Hi")
        client.drain()
        with pytest.raises(Draining):
            client.tokenize("m", "Hi")


def test_tokenize_fails_at_once_when_the_worker_dies(daemon: Daemon):
    daemon.load(source(), "m")
    pid = daemon.worker_pid("m")
    failed: list[BaseException] = []

    def tokenize():
        with daemon.client() as client:
            try:
                client.tokenize("m", "Hi")
            except WorkerDied as error:
                failed.append(error)

    os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(target=tokenize)
    thread.start()
    time.sleep(0.2)  # the request should reach the stopped worker
    os.kill(pid, signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert len(failed) == 1
    wait_for("m is ready again", lambda: daemon.model("m").state == "ready")
    with daemon.client() as client:
        assert client.tokenize("m", "Hi").count == 2


@pytest.fixture
def kvctl(monkeypatch, capsys, home: Home):
    """Return a function that runs kvctl here and returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvctl", "--home", str(home.root), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_settings_are_changed_live_saved_and_unset(make_daemon, home: Home, kvctl):
    text = '# mine\nbudget = "1GiB"\n'
    write_config(home, text)
    daemon = make_daemon().start()

    def setting(key):
        return json.loads(kvctl("config", "get", key, "--json")[1])

    assert setting("budget")["origin"] == "file"
    code, out, err = kvctl("config", "set", "budget", "512MiB")
    assert (code, out) == (0, "")
    assert "1GiB → 512MiB" in err
    with daemon.client() as client:
        assert client.status().budget_bytes == 512 << 20
        client.configure(budget_bytes=256 << 20)
    assert (setting("budget")["value"], setting("budget")["origin"]) == (256 << 20, "live")
    assert "needs a restart" in kvctl("config", "set", "max_rows", "8", "--save")[2]
    assert (setting("max_rows")["pending"], setting("max_rows")["next"]) == (True, 8)
    assert home.config.read_text() == text + "max_rows = 8\n"
    assert kvctl("config", "unset", "max_rows", "--save")[0] == 0
    assert kvctl("config", "unset", "budget")[0] == 0
    assert home.config.read_text() == text
    assert setting("budget")["value"] == "1GiB"
    assert kvctl("config", "set", "log_level", "loud", "--save")[0] == 5
    assert home.config.read_text() == text
    for key in ("budget", "watchdog.decode_s", "log_level"):
        assert f"\n{key} " in kvctl("config")[1]
    daemon.end()
    assert setting("budget")["origin"] == "file"  # without a daemon the file is read
    assert kvctl("config", "set", "max_rows", "4")[0] == 3
    assert kvctl("config", "set", "max_rows", "4", "--save")[0] == 0
    assert setting("max_rows")["value"] == 4


def test_a_daemon_in_a_terminal_reloads_its_configuration(make_daemon, home: Home, kvctl):
    write_config(home, 'budget = "1GiB"')
    daemon = make_daemon("--no-http").start()
    write_config(
        home, f'budget = "2GiB"\nmax_rows = 7\nmodels = [{{source="{source()}",alias="m"}}]'
    )
    code, out, err = kvctl("reload")
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        "budget  1GiB → 2GiB",
        "max_rows  32 → 7; needs a restart of the daemon",
        "models[m]  - → fake:",
        "reloaded config.toml",
    ]
    with daemon.client() as client:
        status = client.status()
        assert (status.budget_bytes, status.config_pending) == (2 << 30, ["max_rows"])
        write_config(home, 'budget = "3GiB"\nbugdet = 1')
        code, _, err = kvctl("reload")
        assert (code, "did you mean budget?" in err) == (5, True)
        status = client.status()
        assert (status.budget_bytes, status.config_reloads) == (2 << 30, 2)
        assert "did you mean budget?" in status.config_error
        write_config(home, 'budget = "3GiB"')
        assert [one.key for one in client.reload().changes] == ["budget", "models[m]"]
        assert client.status().config_error is None
    assert kvctl("reload")[2] == "reloaded config.toml: nothing changes\n"
    assert json.loads(kvctl("reload", "--json")[1]) == {"changes": [], "problems": []}
    daemon.end()
    assert kvctl("reload")[0] == 3


def test_variables_set_the_port_and_the_budget_and_a_budget_too_large_is_reported(
    make_daemon, home: Home, kvctl, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_config(home, 'budget = "1GiB"\nhttp = {port = 1, tcp = false}')
    monkeypatch.setenv("KVD_PORT", str(port))
    monkeypatch.setenv("KVD_BUDGET", "900TiB")
    daemon = make_daemon("--host", "localhost").start()
    with daemon.client() as client:
        status = client.status()
    assert f"http://127.0.0.1:{port}" in status.http
    assert [problem.key for problem in status.problems] == ["budget"]
    warning = "the budget of 900.0 TiB is more than the "
    wait_for("the welcome", lambda: "stop    Ctrl-C" in daemon.output.read_text())
    assert f"WARNING {warning}" in daemon.output.read_text()
    assert f"warning {warning}" in " ".join(kvctl("status")[1].split())
    settings = {key: json.loads(kvctl("config", "get", key, "--json")[1]) for key in OVERRIDDEN}
    assert {one["origin"] for one in settings.values()} == {"command_line"}
    assert "overrides it" in kvctl("config", "set", "http.port", "5")[2]
    assert warning not in kvctl("config", "set", "max_rows", "5")[2]
    assert f"warning: {warning}" in kvctl("config", "--budget", "900TiB")[2]
    assert "warning" not in kvctl("config", "set", "budget", "1GiB")[2]
    code, _, err = kvctl("config", "--budget", "3")
    assert (code, "less than the minimum" in " ".join(err.split())) == (2, True)
    with daemon.client() as client, pytest.raises(ConfigError, match="less than the minimum"):
        client.configure(budget_bytes=3)


OVERRIDDEN = ("budget", "http.host", "http.port", "http.enabled", "http.tcp")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("kvctl tok", {"tokenize"}),
        ("kvctl unload ", {"fast"}),
        ("kvctl chat fa", {"fast"}),
        ("kvctl load de", {"demo"}),
        ("kvctl config get watchdog.de", {"watchdog.decode_s"}),
        ("kvctl generate x", set()),
    ],
)
def test_a_shell_completes_commands_models_and_settings(shared: Daemon, line, found):
    words = line.split(" ")
    environment = {
        **os.environ,
        "KVD_HOME": str(shared.home.root),
        "_KVCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'kvctl'; import kvd.cli; kvd.cli.main()"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert {item.removeprefix("plain,") for item in done.stdout.split()} == found


class Terminal:
    """kvctl on a pseudo-terminal."""

    def __init__(self, daemon: Daemon, *arguments: str) -> None:
        self.fd, inner = pty.openpty()
        self.before = termios.tcgetattr(self.fd)
        self.process = subprocess.Popen(
            daemon.kvctl_command(*arguments),
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "20"},
        )  # fmt: skip
        os.close(inner)
        self.text = ""

    def type(self, text: str) -> None:
        self.text = ""
        os.write(self.fd, text.encode())

    def wait_for(self, text: str) -> None:
        def shown() -> bool:
            if select.select([self.fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.fd, 65536).decode(errors="replace")
            return text in self.text

        wait_for(f"{text!r} in {self.text!r}", shown)

    def drained(self) -> str:
        """Return all output since the last typed text; the process must have ended."""
        while select.select([self.fd], [], [], 0.05)[0]:
            try:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                break
        return self.text

    def close(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEADLINE_S)
        self.process.kill()
        os.close(self.fd)
        return self.process.wait()


def test_chat_survives_ctrl_c_and_stores_the_typed_lines(daemon: Daemon):
    daemon.load(source(tps=50), "slow")
    chat = Terminal(daemon, "chat", "slow")
    chat.wait_for("/help lists")
    chat.type("a question\n")
    wait_for("the request runs", lambda: daemon.model("slow").stats.rows_running)
    os.kill(chat.process.pid, signal.SIGINT)
    chat.wait_for("cancelled")
    chat.type("/stats\n")
    chat.wait_for("first token after")
    chat.type("/nonsense\n")
    chat.wait_for("no command /nonsense")
    chat.type("/exit\n")
    assert chat.close() == 0
    history = daemon.home.root / "chat_history"
    assert history.read_text().splitlines() == ["a question", "/stats", "/nonsense", "/exit"]
    assert history.stat().st_mode & 0o077 == 0
    again = Terminal(daemon, "chat", "slow")
    again.wait_for("/help lists")
    again.type("\x1b[A\x1b[A\x1b[A\x1b[A")
    again.wait_for("a question")
    again.type("\x15/exit\n")
    assert again.close() == 0


def test_a_load_shows_its_progress_and_continues_after_ctrl_c(daemon: Daemon):
    loading = Terminal(daemon, "load", source(load=1.5), "--alias", "m")
    loading.wait_for("%")
    os.kill(loading.process.pid, signal.SIGINT)
    loading.wait_for("kvctl unload m")
    assert loading.close() == 130
    wait_for("the load continues", lambda: daemon.model("m").state == "ready")


ALTERNATE = ("\x1b[?1049h", "\x1b[?1049l")
CURSOR = ("\x1b[?25l", "\x1b[?25h")
"""Sequences that change a terminal's mode and restore it."""


@pytest.mark.parametrize(
    ("arguments", "shown", "modes"),
    [
        (("top",), "fast", (ALTERNATE, CURSOR)),
        (("status", "--watch"), "fast", (CURSOR,)),
        (("chat", "fast"), "› ", ()),  # noqa: RUF001 - the prompt
    ],
    ids=["top", "status", "chat"],
)
def test_sigterm_restores_the_terminal(shared: Daemon, arguments, shown, modes):
    terminal = Terminal(shared, *arguments)
    terminal.wait_for(shown)
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.process.wait(DEADLINE_S) == 143
    text = terminal.drained()
    for change, restore in modes:
        assert text.rindex(restore) > text.rindex(change)
    assert termios.tcgetattr(terminal.fd) == terminal.before
    assert "Traceback" not in text
    terminal.close()
