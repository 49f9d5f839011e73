"""The tables of docs/metrics.md, from the catalogue of metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.metrics.catalogue import GROUPS

if TYPE_CHECKING:
    from kvd.metrics.catalogue import Metric

PAGE = "metrics.md"


def parts() -> dict[str, str]:
    """Return the generated part of the page."""
    return {"metrics": "\n\n".join(_table(title, group) for title, group in GROUPS.items())}


def _table(title: str, metrics: tuple[Metric, ...]) -> str:
    head = "| metric | type | value | use |\n| --- | --- | --- | --- |"
    return "\n".join([f"### {title}\n", head, *map(_row, metrics)])


def _row(metric: Metric) -> str:
    labels = f" `{{{', '.join(metric.labels)}}}`" if metric.labels else ""
    cells = (f"`{metric.name}`{labels}", metric.kind, metric.help, metric.advice)
    return f"| {' | '.join(cells)} |"
