"""`kvctl --install-completion` and `--show-completion`."""

from __future__ import annotations

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
