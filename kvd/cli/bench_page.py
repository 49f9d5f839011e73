"""Renders `kvctl bench`: a table and a picture, from the values that `--json` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.bench.report import COLUMNS
from kvd.bench.traces import TRACES
from kvd.cli.tables import GAP, fixed_column, grid, headed, number_column

_SHOWN = {
    "TOK/S": "tok_s",
    "FIRST TOKEN ms": "ttft_p50",
    "P99": "ttft_p99",
    "GAP ms": "itl_p50",
    "P99 ": "itl_p99",
    "DURING LONG P99": "during_p99",
    "CACHED": "cached_tokens",
}
"""Columns of the table; two headings are P99, so one has a space."""
_DROPPED = ("CACHED", "P99", "GAP ms", "DURING LONG P99")
"""Columns that a narrow table omits, in this order; `--json` has all of them."""
_COLORS = ("cyan", "magenta", "yellow", "blue", "green")
_PANEL_WIDTH = 46
"""Least columns of a panel of the picture; two are side by side if they fit."""
_MAX_CELLS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


class _Panel(NamedTuple):
    title: str
    measure: str


_PANELS = (
    _Panel("tokens per second, more is better", "tok_s"),
    _Panel("first token p50 in ms, less is better", "ttft_p50"),
)


def page(result: Mapping[str, Any], width: int) -> RenderableType:
    parts: list[RenderableType] = [_head(result), Text(), table(result, width), Text()]
    parts += [picture(result, width), *_footnotes(result)]
    return Group(*parts)


def _head(result: Mapping[str, Any]) -> Text:
    kind = ", ".join(filter(None, (result["kv_scheme"], result["attention_path"])))
    text = Text.assemble((result["model"], "bold"), f"  {kind}  {result['machine']}")
    for name, about in result["servers"].items():
        text.append(f"\n{name}: {about}", "dim")
    return text


def table(result: Mapping[str, Any], width: int) -> Table:
    """Return the medians over runs, with the columns that fit."""
    rows = list(_rows(result))
    titles = ["TRACE", "SERVER", *_SHOWN]
    filled = [title for title in titles if any(row[title].strip("-") for row in rows)]
    sizes = {
        title: max(cell_len(text) for text in (title, *(row[title] for row in rows))) + GAP
        for title in filled
    }
    for title in _DROPPED:
        if sum(sizes[one] for one in filled) <= width:
            break
        if title in filled:
            filled.remove(title)
    columns = [
        (fixed_column if title in {"TRACE", "SERVER"} else number_column)(title) for title in filled
    ]
    found = headed(*columns)
    for row in rows:
        found.add_row(*(row[title] for title in filled))
    return found


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    stopped = {tuple(pair) for pair in result["stopped"]}
    for trace, sides in result["traces"].items():
        for number, (side, measured) in enumerate(sides.items()):
            row = {"TRACE": "" if number else trace, "SERVER": side}
            for title, name in _SHOWN.items():
                row[title] = _cell(name, measured["median"].get(name))
            if (trace, side) in stopped:
                row["TOK/S"] += "*"
            yield row


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    _, factor, digits = COLUMNS.get(name, ("", 1, 0))
    return f"{value * factor:,.{digits}f}"


def picture(result: Mapping[str, Any], width: int) -> RenderableType:
    """Return bars for each panel, side by side if they fit."""
    beside = 2 if width >= 2 * _PANEL_WIDTH + GAP else 1
    panels = [_panel(result, panel, width // beside - GAP) for panel in _PANELS]
    if beside == 1:
        return Group(panels[0], Text(), panels[1])
    return Columns(panels, padding=(0, GAP), equal=True)


def _panel(result: Mapping[str, Any], panel: _Panel, width: int) -> RenderableType:
    sides = list(result["servers"])
    lines: list[tuple[str, str, float | None]] = []
    for trace, found in result["traces"].items():
        for number, side in enumerate(found):
            value = found[side]["median"].get(panel.measure)
            lines.append(("" if number else trace, side, value))
    most = max((value for *_, value in lines if value), default=1.0)
    labels = [_cell(panel.measure, value) for *_, value in lines]
    names = max((cell_len(side) for side in sides), default=0)
    taken = max(map(cell_len, TRACES)) + names + max(map(cell_len, labels), default=0) + 3 * GAP
    cells = max(8, min(_MAX_CELLS, width - taken))
    body = grid(fixed_column(style="bold"), fixed_column(), fixed_column())
    for (trace, side, value), label in zip(lines, labels, strict=True):
        color = _COLORS[sides.index(side) % len(_COLORS)]
        drawn = Text.assemble((bar((value or 0.0) / most, cells), color), f" {label}")
        body.add_row(trace, side, drawn)
    return Group(Text(panel.title, "dim"), body)


def bar(share: float, cells: int) -> str:
    """Return a bar of up to ``cells`` cells, to an eighth of a cell; never empty above 0."""
    eighths = max(round(share * cells * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _footnotes(result: Mapping[str, Any]) -> Iterator[Text]:
    notes: Sequence[str] = result["notes"]
    if result["stopped"] or notes:
        yield Text()
    if result["stopped"]:
        text = "* stopped at the time limit: counts what had arrived; --seconds gives more time"
        yield Text(text, style="yellow")
    for note in notes:
        yield Text(note, style="yellow")
