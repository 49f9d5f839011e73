"""The tables of docs/metrics.md, from the catalogue: `python -m kvd.metrics.reference` writes them.

What is around them is written by hand; a test holds them to the catalogue.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.metrics.catalogue import GROUPS

if TYPE_CHECKING:
    from kvd.metrics.catalogue import Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def tables() -> str:
    """Return all metrics as Markdown, a table for each group."""
    parts = []
    for title, metrics in GROUPS.items():
        rows = [_row(metric) for metric in metrics]
        head = "| metric | type | what it says | when to look at it |\n| --- | --- | --- | --- |"
        parts.append("\n".join([f"### {title}\n", head, *rows]))
    return "\n\n".join(parts)


def _row(metric: Metric) -> str:
    labels = f" `{{{', '.join(metric.labels)}}}`" if metric.labels else ""
    cells = (f"`{metric.name}`{labels}", metric.kind, metric.help, metric.look)
    return f"| {' | '.join(cells)} |"


def filled(page: str) -> str:
    """Return the page with the tables of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
