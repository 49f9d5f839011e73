"""`kvctl --install-completion` and `--show-completion`."""

from __future__ import annotations

import os
from pathlib import Path

import rich_click as click
from click.shell_completion import get_completion_class

from kvd.cli.common import option_group

_FILES = {
    "bash": ".bash_completions/kvctl.sh",
    "zsh": ".zfunc/_kvctl",
    "fish": ".config/fish/completions/kvctl.fish",
}
"""Each shell's file for the script, in the user's home."""
_ZSH_LINE = "fpath+=~/.zfunc; autoload -Uz compinit; compinit"


def _shell() -> str:
    return Path(os.environ.get("SHELL", "")).name


def _script(context: click.Context) -> str:
    shell = _shell()
    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(
            f"there is no completion for the shell {shell!r}; name one, as in "
            "`SHELL=bash kvctl --show-completion` (bash, zsh or fish)"
        )
    root = context.find_root()
    assert root.info_name is not None
    variable = f"_{root.info_name}_complete".replace("-", "_").upper()
    return completion(root.command, {}, root.info_name, variable).source()


def install(script: str, shell: str, home: Path) -> Path:
    """Write a completion script where the shell reads it; return the file.

    bash and zsh get a line in their startup file, unless it is there already.
    """
    file = home / _FILES[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    if shell == "bash":
        _add_line(home / ".bashrc", f"source '{file}'")
    elif shell == "zsh":
        _add_line(home / ".zshrc", _ZSH_LINE)
    return file


def _add_line(startup_file: Path, line: str) -> None:
    text = startup_file.read_text(encoding="utf-8") if startup_file.exists() else ""
    if line not in text:
        newline = "" if not text or text.endswith("\n") else "\n"
        startup_file.write_text(f"{text}{newline}{line}\n", encoding="utf-8")


def _install(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    script, shell = _script(context), _shell()
    if shell not in _FILES:
        raise click.UsageError(
            f"cannot install completion for {shell}; `kvctl --show-completion` prints the script"
        )
    click.echo(f"{shell} completion installed in {install(script, shell, Path.home())}")
    click.echo("It takes effect in the next terminal.")
    context.exit()


def _show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(_script(context))
        context.exit()


completion_options = option_group(
    click.option(
        "--install-completion", is_flag=True, expose_value=False, callback=_install,
        help="Install completion for your login shell.",
    ),
    click.option(
        "--show-completion", is_flag=True, expose_value=False, callback=_show,
        help="Print the completion script for your login shell.",
    ),
)  # fmt: skip
