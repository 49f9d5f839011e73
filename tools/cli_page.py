"""Writes docs/cli.md from the commands themselves: ``python tools/cli_page.py [--check]``.

With ``--check`` it changes nothing and fails if the page is not what it would write.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from kvd.cli.app import COMMANDS, app
from kvd.host.exits import Exit

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
COMMON = ("--home", "--socket", "--json", "--help")
MEANINGS = {
    Exit.OK: "done",
    Exit.FAILED: "anything that is not below; the message says what",
    Exit.USAGE: "the command line is wrong",
    Exit.NOT_RUNNING: "no daemon answers on the socket",
    Exit.ALREADY_RUNNING: "another daemon holds the home",
    Exit.CONFIG: "the configuration or the home is wrong",
    Exit.REFUSED: "the request asks for what cannot be: no such model, a prompt too long",
    Exit.RETRY: "it may work as it is in a moment",
    Exit.INTERRUPTED: "Ctrl-C",
    Exit.TERMINATED: "SIGTERM",
    Exit.PIPE: "whoever read the output has hung up",
}
HEAD = """\
# kvctl

<!-- Written by tools/cli_page.py from the commands themselves; do not edit. -->

Data goes to stdout and talk to stderr, so pipes get the data alone. Colours are for terminals only;
`NO_COLOR=1` turns them off there too. Tables fit the terminal's width; into a pipe goes all.

These options are understood wherever they make sense, before a command's name as well as after it:

| option | |
| --- | --- |
| `--home PATH` | the daemon's home (default: `KVD_HOME`, else `~/.kvd`) |
| `--socket PATH` | the daemon's socket (default: `kvd.sock` in its home) |
| `--json` | data as JSON, a line for each object or event; errors too: `{"error": …}` |
| `--help` | what is on this page |

`kvctl --install-completion` lets your shell complete commands, options, models and settings.

## Exit codes

| code | |
| --- | --- |
"""


def main() -> int:
    """Write the page, or check it."""
    text = written()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not what the commands say; run `python tools/cli_page.py`", file=sys.stderr)
    return 1


def written() -> str:
    """Return the page."""
    root: Any = get_command(app)
    context = root.make_context("kvctl", [], resilient_parsing=True)
    parts = [HEAD.rstrip(), *(f"| {int(code)} | {MEANINGS[code]} |" for code in Exit), ""]
    for panel, commands in groupby(COMMANDS, lambda one: one.panel):
        parts += [f"## {panel}", ""]
        for one in commands:
            parts += described(root.get_command(context, one.name), f"kvctl {one.name}")
    return "\n".join(parts).rstrip() + "\n"


def described(command: Any, name: str) -> list[str]:
    """Return the lines about a command, and about those that it has."""
    if command.hidden:
        return []
    context = typer.Context(command, info_name=name)
    pieces = " ".join(command.collect_usage_pieces(context))
    lines = [f"### {name}", "", command.help.strip(), "", "```", f"{name} {pieces}", "```", ""]
    told = [one for one in command.get_params(context) if not is_common(one) and not one.hidden]
    if (picture := PAGE.parent / "img" / f"{name.removeprefix('kvctl ')}.svg").exists():
        lines += [f"![{name}]({picture.relative_to(PAGE.parent)})", ""]
    rows = [f"| {spelled(one, context)} | {explained(one)} |" for one in told]
    if rows:
        lines += ["| | |", "| --- | --- |", *rows, ""]
    for below in getattr(command, "commands", {}).values():
        lines += described(below, f"{name} {below.name}")
    return lines


def is_common(param: Any) -> bool:
    """Return whether the top of the page tells of it."""
    return any(option in COMMON for option in param.opts)


def spelled(param: Any, context: Any) -> str:
    """Return an argument, or an option with its value, as one writes it."""
    metavar = (param.metavar if param.metavar is not None else param.make_metavar(context)).strip(
        "[]"
    )
    if param.param_type_name == "argument":
        return f"`{metavar}`".replace("|", "\\|")
    names = ", ".join(f"`{name}`" for name in sorted(param.opts, key=len, reverse=True))
    value = "" if param.is_flag or not metavar else f" `{metavar}`"
    return f"{names}{value}".replace("|", "\\|")


def explained(param: Any) -> str:
    """Return the option's help, with the default if it is informative."""
    text = (param.help or "").strip().replace("|", "\\|")
    default = param.default
    tells = isinstance(default, int | float | str) and not isinstance(default, bool)
    if param.param_type_name == "argument" or not tells or "default" in text:
        return text
    return (
        f"{text} Default: {default:g}."
        if isinstance(default, float)
        else f"{text} Default: {default}."
    )


if __name__ == "__main__":
    sys.exit(main())
