"""`kvctl doctor`: what is right and wrong here, and what to do; `--selftest` proves more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvd
from kvd.cli.common import (
    HomeOption,
    JsonOption,
    said,
    stderr_console,
    stdout_console,
    talk,
    terms,
)
from kvd.doctor.examination import examine
from kvd.doctor.finding import Finding, Section, worst
from kvd.doctor.scene import Scene
from kvd.host.exits import Exit
from kvd.host.home import locate

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_NAME = 14
"""Cells of a name; a longer one wraps."""


def doctor(
    context: typer.Context,
    *,
    selftest: Annotated[
        bool,
        typer.Option(
            "--selftest", metavar="", help="Also compute, serve and measure; writes a report."
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="The selftest's short form.")
    ] = False,
    service: Annotated[
        bool,
        typer.Option(
            "--service", metavar="", help="The selftest installs and removes a service of its own."
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where its report goes (default: here)."),
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Check this machine and home, and say what to do. Exit code 1: something does not work."""
    if (quick or service or report is not None) and not selftest:
        raise typer.BadParameter("--quick, --service and --report are for --selftest")
    wanted = terms(context, home, None, json=json)
    scene = Scene(locate(wanted.home))
    console = stdout_console()
    sections: list[Section] = []

    def take(section: Section) -> None:
        sections.append(section)
        if not wanted.json:
            show(console, section)

    with wanted.guarded():
        if not wanted.json:
            console.print(Text.assemble(("kvd ", "bold"), f"{kvd.__version__} on {scene.machine}"))
        for section in examine(scene):
            take(section)
        if selftest:
            _test(scene, take, quick=quick, service=service)
            for file in _written(scene, sections, report or Path.cwd()):
                talk("[dim]wrote[/] {}", file)
        verdict = worst(sections)
        if wanted.json:
            wanted.print_json({"verdict": verdict, "machine": scene.machine, "sections": sections})
        else:
            talk(_sum(sections))
        if verdict == "fail":
            raise typer.Exit(Exit.FAILED)


def _test(scene: Scene, take: Callable[[Section], None], *, quick: bool, service: bool) -> None:
    from kvd.doctor import selftest  # noqa: PLC0415 - only then

    with stderr_console().status("selftest") as waiting:
        for step in selftest.run(scene, quick=quick, service=service):
            if isinstance(step, str):
                waiting.update(said("selftest: {}", step))
            else:
                take(step)


def _written(scene: Scene, sections: list[Section], folder: Path) -> list[Path]:
    from kvd.doctor.report import Report, write  # noqa: PLC0415 - only then

    return write(Report.of(scene, sections), folder)


def show(console: Console, section: Section) -> None:
    """Print a section; what to do stands below what was found."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4, no_wrap=True)
    width = max([_NAME, *(len(one.name) for one in section.findings)])
    table.add_column(width=min(width, 2 * _NAME), overflow="fold")
    table.add_column(overflow="fold")
    for one in section.findings:
        table.add_row(Text(one.verdict, _COLOURS[one.verdict]), Text(one.name), _text(one))
    console.print(Text(f"\n{section.title}", "bold"))
    console.print(table)


def _text(one: Finding) -> Text:
    text = Text(one.said, "dim" if one.verdict == "skip" else "")
    if one.todo is not None:
        text.append(f"\n→ {one.todo}", "yellow" if one.verdict == "warn" else "red")
    return text


def _sum(sections: list[Section]) -> str:
    counts = {
        verdict: sum(one.verdict == verdict for section in sections for one in section.findings)
        for verdict in ("fail", "warn")
    }
    if not any(counts.values()):
        return "\n[green]all is well[/]"
    said = []
    if counts["fail"]:
        said.append(f"[bold red]{counts['fail']} failed[/]")
    if counts["warn"]:
        said.append(f"[yellow]{counts['warn']} could be better[/]")
    return "\n" + ", ".join(said)
