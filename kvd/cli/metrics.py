"""`kvctl metrics`: the daemon's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import rich_click as click
from rich.text import Text

from kvd.cli.common import CommonOptions, common_options
from kvd.cli.console import print_message, stdout_console, write
from kvd.host.exits import Exit


class Sample(msgspec.Struct, frozen=True):
    """One sample of a metric, as ``--json`` prints it."""

    name: str
    labels: dict[str, str]
    value: float


@click.command()
@click.argument("name", required=False, help="Only metrics with this in their name.")
@common_options()
def metrics(common: CommonOptions, name: str | None) -> None:
    """Print the daemon's metrics in Prometheus's text format."""
    with common.connected() as client:
        found = [lines for family, lines in families(client.metrics()) if (name or "") in family]
        if not found:
            print_message("no metric's name contains this; `kvctl metrics` prints all of them")
            raise SystemExit(Exit.FAILED)
        lines = [line for family in found for line in family]
        if common.json:
            common.print_json(samples(lines))
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
    from prometheus_client.parser import (  # noqa: PLC0415 - slow to import, and only for --json
        text_string_to_metric_families as parse,
    )

    parsed = (sample for family in parse("\n".join(lines)) for sample in family.samples)
    return [Sample(sample.name, sample.labels, sample.value) for sample in parsed]


def _print(lines: list[str]) -> None:
    """Print the lines unchanged; on a terminal, highlight what people read first."""
    console = stdout_console()
    if not console.is_terminal:
        write("\n".join(lines) + "\n")
        return
    for line in lines:
        text = Text(line, style="dim" if line.startswith("# TYPE") or "_bucket{" in line else "")
        if line.startswith("# HELP"):
            text.stylize("bold")
        console.print(text, soft_wrap=True)
