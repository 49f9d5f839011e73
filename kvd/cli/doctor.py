"""`kvctl doctor`: checks of this machine and home, with advice; `--selftest` runs more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvd
from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.console import format_message, print_message, stderr_console, stdout_console
from kvd.doctor.examination import examine
from kvd.doctor.finding import Finding, Section, worst
from kvd.doctor.scene import Scene
from kvd.host.exits import Exit
from kvd.host.home import locate

_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_NAME_WIDTH = 14
"""Minimum width of the names' column. The maximum is twice that; longer names wrap."""


@click.command()
@click.option("--selftest", is_flag=True, help="Also compute, serve and measure; writes a report.")
@click.option("--quick", is_flag=True, help="Run a short selftest.")
@click.option("--service", is_flag=True, help="Let the selftest install and remove a service.")
@option(
    "--report",
    "FOLDER",
    "Folder of the selftest's report (default: the current one).",
    type=click.Path(path_type=Path),
)
@common_options("home", "json")
def doctor(
    common: CommonOptions, *, selftest: bool, quick: bool, service: bool, report: Path | None
) -> None:
    """Check this machine and home, and print advice. Exit code 1: a check failed."""
    if (quick or service or report is not None) and not selftest:
        raise click.BadParameter("--quick, --service and --report need --selftest")
    scene = Scene(locate(common.home))
    console = stdout_console()
    sections: list[Section] = []

    def add(section: Section) -> None:
        sections.append(section)
        if not common.json:
            show(console, section)

    with common.guarded():
        if not common.json:
            console.print(Text.assemble(("kvd ", "bold"), f"{kvd.__version__} on {scene.machine}"))
        for section in examine(scene):
            add(section)
        if selftest:
            _run_selftest(scene, add, quick=quick, service=service)
            from kvd.doctor.report import Report, write  # noqa: PLC0415 - only with --selftest

            for file in write(Report.of(scene, sections), report or Path.cwd()):
                print_message("[dim]wrote[/] {}", file)
        verdict = worst(sections)
        if common.json:
            common.print_json({"verdict": verdict, "machine": scene.machine, "sections": sections})
        else:
            print_message(_summary(sections))
        if verdict == "fail":
            raise SystemExit(Exit.FAILED)


def _run_selftest(
    scene: Scene, add: Callable[[Section], None], *, quick: bool, service: bool
) -> None:
    from kvd.doctor import selftest  # noqa: PLC0415 - only with --selftest

    with stderr_console().status("selftest") as progress:
        for step in selftest.run(scene, quick=quick, service=service):
            if isinstance(step, str):
                progress.update(format_message("selftest: {}", step))
            else:
                add(step)


def show(console: Console, section: Section) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4, no_wrap=True)
    width = max([_NAME_WIDTH, *(len(finding.name) for finding in section.findings)])
    table.add_column(width=min(width, 2 * _NAME_WIDTH), overflow="fold")
    table.add_column(overflow="fold")
    for finding in section.findings:
        verdict = Text(finding.verdict, _COLORS[finding.verdict])
        table.add_row(verdict, Text(finding.name), _text(finding))
    console.print(Text(f"\n{section.title}", "bold"))
    console.print(table)


def _text(finding: Finding) -> Text:
    text = Text(finding.observed, "dim" if finding.verdict == "skip" else "")
    if finding.advice is not None:
        text.append(f"\n→ {finding.advice}", "yellow" if finding.verdict == "warn" else "red")
    return text


def _summary(sections: list[Section]) -> str:
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    parts = []
    if failed := verdicts.count("fail"):
        parts.append(f"[bold red]{failed} failed[/]")
    if warnings := verdicts.count("warn"):
        parts.append(f"[yellow]{warnings} warning{'' if warnings == 1 else 's'}[/]")
    return "\n" + (", ".join(parts) or "[green]no problems found[/]")
