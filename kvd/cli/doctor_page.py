"""Renders the checks of `kvctl doctor`, and the speeds of its selftest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import kvd
from kvd.doctor.finding import Finding, Section, Verdict, worst
from kvd.doctor.scene import Scene

if TYPE_CHECKING:
    from kvd.doctor.measurements import Speed

_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_NAME_WIDTH = 14
"""Minimum width of the names' column. The maximum is twice that; longer names wrap."""


class Page:
    """The sections so far; prints each one, if there is a console."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self.sections: list[Section] = []

    @property
    def verdict(self) -> Verdict:
        return worst(self.sections)

    def head(self, scene: Scene) -> None:
        if self.console is not None:
            text = f"{kvd.__version__} on {scene.machine}"
            self.console.print(Text.assemble(("kvd ", "bold"), text))

    def add(self, section: Section) -> None:
        self.sections.append(section)
        if self.console is not None:
            _show(self.console, section)

    def add_speed(self, speed: Speed) -> None:
        if self.console is not None:
            self.console.print(speed_table(speed))


def _show(console: Console, section: Section) -> None:
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


def summary(sections: list[Section]) -> str:
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    parts = []
    if failed := verdicts.count("fail"):
        parts.append(f"[bold red]{failed} failed[/]")
    if warnings := verdicts.count("warn"):
        parts.append(f"[yellow]{warnings} warning{'' if warnings == 1 else 's'}[/]")
    return "\n" + (", ".join(parts) or "[green]no problems found[/]")


def speed_table(speed: Speed) -> RenderableType:
    """Return the speeds of both sides, in at most 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("tokens/s, medians")
    for name in ("kvd", "mlx-lm", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("ratios of rounds")
    for cell in speed.cells:
        if cell.kvd is None or cell.mlx_lm is None or cell.ratio is None:
            table.add_row(cell.name, "", "", "", Text("skipped", "dim"))
        else:
            table.add_row(
                cell.name,
                f"{cell.kvd.median:.0f}",
                f"{cell.mlx_lm.median:.0f}",
                f"{cell.ratio:.2f}",
                f"{cell.ratio_low:.2f} to {cell.ratio_high:.2f}",
            )
    facts = f"{speed.served.architecture}, {speed.served.parameters / 1e6:.1f} M parameters"
    return Group(Text(f"\nkvd beside mlx-lm: {speed.model} ({facts})", "bold"), table)
