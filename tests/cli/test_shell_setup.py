"""`kvctl --install-completion` and `--show-completion`."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli.app import app
from kvd.cli.shell_setup import install


@pytest.mark.parametrize(
    ("shell", "startup_file", "script_file"),
    [
        ("bash", ".bashrc", ".bash_completions/kvctl.sh"),
        ("zsh", ".zshrc", ".zfunc/_kvctl"),
        ("fish", None, ".config/fish/completions/kvctl.fish"),
    ],
)
def test_the_script_is_installed_once_where_the_shell_reads_it(
    tmp_path: Path, shell: str, startup_file: str | None, script_file: str
):
    if startup_file is not None:
        (tmp_path / startup_file).write_text("alias k=kvctl")
    for script in ("old", "new"):
        assert install(script, shell, tmp_path) == tmp_path / script_file
    assert (tmp_path / script_file).read_text() == "new"
    if startup_file is not None:
        first, second = (tmp_path / startup_file).read_text().splitlines()
        assert first == "alias k=kvctl"
        assert ".zfunc" in second or str(tmp_path / script_file) in second


def run(*arguments: str, shell: str, home: Path):
    environment = {"SHELL": shell, "HOME": str(home)}
    return CliRunner().invoke(app, arguments, env=environment, prog_name="kvctl")


def test_the_script_completes_kvctl(tmp_path: Path):
    shown = run("--show-completion", shell="/bin/zsh", home=tmp_path)
    assert (shown.exit_code, "_KVCTL_COMPLETE=zsh_complete" in shown.output) == (0, True)
    installed = run("--install-completion", shell="/bin/zsh", home=tmp_path)
    assert (installed.exit_code, "zsh completion installed" in installed.output) == (0, True)
    assert (tmp_path / ".zfunc/_kvctl").read_text().strip() == shown.output.strip()


def test_an_unknown_shell_is_a_usage_error(tmp_path: Path):
    for option in ("--install-completion", "--show-completion"):
        done = run(option, shell="/bin/dash", home=tmp_path)
        assert (done.exit_code, "no completion for the shell 'dash'" in done.output) == (2, True)
    assert not list(tmp_path.iterdir())


def completions(words: str, **environment: str) -> str:
    """Return what bash gets for the word after ``words``, one ``type,value`` in a line."""
    words += " "
    given = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split())), **environment}
    given["_KVCTL_COMPLETE"] = "bash_complete"
    return CliRunner().invoke(app, env=given, prog_name="kvctl").output


def test_paths_are_completed_by_the_shell() -> None:
    for words in ("kvctl --home", "kvctl status --socket"):
        assert completions(words) == "file,\n"


def test_a_folder_without_a_dot_is_completed_by_the_shell(tmp_path: Path) -> None:
    given = {"HF_HUB_CACHE": str(tmp_path), "COMP_WORDS": "kvctl load Qwenf", "COMP_CWORD": "2"}
    assert completions("", **given) == "dir,Qwenf\n"


def test_commands_are_listed_in_the_order_of_the_help() -> None:
    listed = [line.partition(",")[2] for line in completions("kvctl service").splitlines()]
    assert listed[:3] == ["install", "uninstall", "start"]


def test_a_usage_error_in_a_file_has_no_colours(tmp_path: Path) -> None:
    """Stdout is a terminal, stderr is a file."""
    error = tmp_path / "error"
    command = f"{sys.executable} -m kvd.cli nope 2> {error}"
    leader, follower = pty.openpty()
    subprocess.run(command, shell=True, stdout=follower, stdin=follower, check=False)
    os.close(leader)
    os.close(follower)
    assert "No such command" in error.read_text()
    assert "\x1b" not in error.read_text()
