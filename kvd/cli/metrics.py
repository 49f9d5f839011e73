"""`kvctl metrics`: what Prometheus would read, for people and scripts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvd.cli.common import (
    HomeOption,
    JsonOption,
    SocketOption,
    stdout_console,
    talk,
    terms,
)
from kvd.exits import Exit

_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


class Sample(msgspec.Struct, frozen=True):
    """One line, for programs."""

    name: str
    labels: dict[str, str]
    value: float


def metrics(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only metrics with this in their name.")
    ] = None,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Print the daemon's metrics, in Prometheus's text format."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        found = [lines for family, lines in families(client.metrics()) if (name or "") in family]
        if not found:
            talk("no metric has this in its name; `kvctl metrics` prints all of them")
            raise typer.Exit(Exit.FAILED)
        lines = [line for family in found for line in family]
        if wanted.json:
            wanted.print_json([sample(line) for line in lines if not line.startswith("#")])
        else:
            _print(lines)


def families(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each metric's name with its lines; the first of them is its help."""
    lines: list[str] = []
    name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            if lines:
                yield name, lines
            name, lines = line.split(" ", 3)[2], []
        lines.append(line)
    if lines:
        yield name, lines


def sample(line: str) -> Sample:
    """Read a line that is no comment."""
    found = _SAMPLE.fullmatch(line)
    if found is None:
        raise ValueError(f"no sample: {line}")
    labels = {
        key: re.sub(r"\\.", lambda it: _ESCAPES.get(it[0], it[0]), value)
        for key, value in _LABEL.findall(found["labels"] or "")
    }
    return Sample(found["name"], labels, float(found["value"]))


def _print(lines: list[str]) -> None:
    """Print them as they are; on a terminal what is for machines stands back."""
    console = stdout_console()
    if not console.is_terminal:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        return
    for line in lines:
        text = Text(line, style="dim" if line.startswith("# TYPE") or "_bucket{" in line else "")
        if line.startswith("# HELP"):
            text.stylize("bold")
        console.print(text, soft_wrap=True)
