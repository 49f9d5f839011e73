"""`kvctl metrics`: what Prometheus would read, for people and scripts."""

from __future__ import annotations

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
from kvd.host.exits import Exit


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
            wanted.print_json(samples(lines))
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


def samples(lines: list[str]) -> list[Sample]:
    """Read the lines of some metrics."""
    from prometheus_client.parser import (  # noqa: PLC0415 - a moment that only --json takes
        text_string_to_metric_families as parse,
    )

    read = (it for family in parse("\n".join(lines)) for it in family.samples)
    return [Sample(it.name, it.labels, it.value) for it in read]


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
