"""Renders `kvctl top` from a status, events and the state that keys change. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvd.cli import model_page, status_page
from kvd.cli.events import line as event_line
from kvd.cli.tables import GAP, grid, headed
from protocol.messages import EventRecord
from protocol.types import DaemonStatus, ModelStatus

SORTS: dict[str, tuple[str, Callable[[ModelStatus], Any]]] = {
    "n": ("MODEL", lambda model: model.name),
    "a": ("STATE", lambda model: model.state),
    "r": ("ROWS", lambda model: model.stats.rows_running + model.stats.rows_prefilling),
    "w": ("QUEUED", status_page.queued),
    "t": ("TOK/S", lambda model: model.stats.tokens_per_s),
    "k": ("KV", status_page.kv_bytes),
    "m": ("GRANTED", lambda model: model.granted_bytes),
}
"""Column and sort key by the key to press. Texts sort ascending, numbers descending."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_HISTORY = 240
"""Past values kept for curves, and past events."""
_MAX_EVENTS = 16
_MIN_WIDTHS = {"ROWS": 4, "TOK/S": 6, "KV": 8, "LEVELS": 9, "GRANTED": 8, "MEMORY": 8, "PAGES": 9}
"""Widths of columns whose numbers change often; without them the table would jitter."""
_NAME_WIDTH = 24
"""Columns reserved for a long name before another column is shown."""
_MIN_CURVE, _MAX_CURVE = 10, 40
_HELP = (
    ("q", "quit"),
    ("↑ ↓", "choose a model"),
    ("enter", "show its details; enter or escape: back"),
    *((key, f"sort by {column.lower()}") for key, (column, _) in SORTS.items()),
    ("s", "sort by the next column"),
    ("R", "reverse the order"),
    ("space", "pause the display; again: continue"),
    ("+ -", "update less often, more often"),
    ("?", "show this page"),
)


@dataclass
class View:
    """The state that keys change, and the history for curves."""

    sort: str = "t"
    reverse: bool = False
    selected: str | None = None
    page: str = "models"
    """``models``, ``model`` or ``help``."""
    paused: bool = False
    error: str = ""
    """Message of the last poll's error; empty after a success."""
    interval_s: float = 1.0
    total: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    """Tokens per second of all models, the newest last."""
    by_model: dict[str, deque[float]] = field(default_factory=dict)
    """Tokens per second by model, the newest last."""
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def take(self, status: DaemonStatus, events: Sequence[EventRecord]) -> None:
        self.error = ""
        self.events.extend(events)
        self.total.append(sum(model.stats.tokens_per_s for model in status.models))
        loaded = {model.name for model in status.models}
        for name in self.by_model.keys() - loaded:
            del self.by_model[name]
        for model in status.models:
            history = self.by_model.setdefault(model.name, deque(maxlen=_HISTORY))
            history.append(model.stats.tokens_per_s)

    def press(self, key: str, status: DaemonStatus | None) -> None:
        if key == "?":
            self.page = "models" if self.page == "help" else "help"
        elif key == "escape":
            self.page = "models"
        elif key == "space":
            self.paused = not self.paused
        elif key in "+-" and len(key) == 1:
            factor = 2.0 if key == "+" else 0.5
            self.interval_s = min(60.0, max(0.25, self.interval_s * factor))
        elif key in SORTS:
            self.sort, self.reverse = key, False
        elif key == "s":
            keys = list(SORTS)
            self.sort, self.reverse = keys[(keys.index(self.sort) + 1) % len(keys)], False
        elif key == "R":
            self.reverse = not self.reverse
        elif status is not None and status.models:
            self._select(key, [model.name for model in self.sorted(status.models)])

    def _select(self, key: str, names: list[str]) -> None:
        index = names.index(self.selected) if self.selected in names else None
        steps = {"down": 1, "up": -1, "page down": 10, "page up": -10}
        if key in steps:
            start = -1 if key.endswith("down") else len(names)
            index = (start if index is None else index) + steps[key]
        elif key in {"home", "end"}:
            index = 0 if key == "home" else len(names) - 1
        elif key == "enter":
            index = 0 if index is None else index
            self.page = "models" if self.page == "model" else "model"
        if index is not None:
            self.selected = names[min(len(names) - 1, max(0, index))]

    def sorted(self, models: Sequence[ModelStatus]) -> list[ModelStatus]:
        """Return the models in the selected order; equal ones by name."""
        _, sort_key = SORTS[self.sort]
        by_name = sorted(models, key=lambda model: model.name)
        return sorted(by_name, key=sort_key, reverse=self.descending)

    @property
    def descending(self) -> bool:
        return (self.sort not in {"n", "a"}) != self.reverse


def page(view: View, status: DaemonStatus | None, width: int, height: int) -> RenderableType:
    if view.page == "help":
        return Group(_keys(), Text("\n? or escape goes back", "dim"))
    if status is None:
        return Group(Text(view.error or "…", "yellow"), Text("\nq quits", "dim"))
    head = _head(view, status, width)
    body_height = max(2, height - len(head) - 2)
    selected = next((model for model in status.models if model.name == view.selected), None)
    if view.page == "model" and selected is not None:
        return Group(*head, Text(), model_page.page(selected))
    return Group(*head, Text(), *_body(view, status, width, body_height), _foot(view, width))


def _head(view: View, status: DaemonStatus, width: int) -> list[Text]:
    rows = sum(status_page.rows(model) for model in status.models)
    queued = sum(status_page.queued(model) for model in status.models)
    paused = sum(model.paused for model in status.models)
    counts = f"{_count(len(status.models), 'model')}, {_count(rows, 'row')}"
    counts += f", {queued} queued" if queued else ""
    counts += f", {paused} paused" if paused else ""
    now = view.total[-1] if view.total else 0.0
    speed = Text.assemble("tok/s  ", (f"{now:,.0f} ", "bold"), f" {counts}  ")
    curve = spark(list(view.total), max(0, width - speed.cell_len))
    lines = [
        status_page.daemon(status),
        status_page.budget(status, width),
        speed.append(curve, "green"),
    ]
    if view.error:
        lines.append(Text(f"{view.error}; the last known state is shown", "bold yellow"))
    return [_one_line(line) for line in lines]


def spark(values: Sequence[float], cells: int) -> str:
    """Return a curve of the newest values, one cell each, scaled to their maximum."""
    shown = list(values)[-cells:] if cells > 0 else []
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    steps = len(_BLOCKS) - 1
    heights = (max(1, round(value / top * steps)) if value > 0 else 0 for value in shown)
    return "".join(_BLOCKS[height] for height in heights)


def _body(view: View, status: DaemonStatus, width: int, height: int) -> list[RenderableType]:
    """Return the models, their errors and the newest events, in ``height`` lines."""
    if not status.models:
        return [Text("no models; load one with `kvctl load demo`", "dim"), Text()]
    models = view.sorted(status.models)
    errors = [_one_line(status_page.error(model)) for model in models if model.error]
    errors = errors[: max(0, height // 4)]
    room = min(_MAX_EVENTS, height - len(models) - len(errors) - 3)
    events = list(view.events)[-room:] if room > 0 else []
    below = len(errors) + (len(events) + 1 if events else 0)
    lines = height - 1 - below
    first = _first(models, view.selected, lines)
    parts: list[RenderableType] = [_models(view, models[first : first + lines], width), *errors]
    if events:
        parts += [Text(), *(_one_line(event_line(event)) for event in events)]
    filler = height - 1 - min(len(models), lines) - below
    return parts + [Text()] * max(0, filler)


def _first(models: list[ModelStatus], selected: str | None, lines: int) -> int:
    index = next((n for n, model in enumerate(models) if model.name == selected), 0)
    return max(0, min(index - lines // 2, len(models) - lines))


def _models(view: View, models: list[ModelStatus], width: int) -> Table:
    rows = [status_page.cells(model) for model in models]
    longest = max(len("MODEL"), *(len(model.name) for model in models))
    min_widths = {**_MIN_WIDTHS, "MODEL": min(_NAME_WIDTH, longest)}
    columns = status_page.fitting(rows, width, min_widths)
    used = sum(size + GAP for size in columns.values())
    columns["MODEL"] = min(longest, columns["MODEL"] + max(0, width - used))
    curve = min(_MAX_CURVE, width - sum(size + GAP for size in columns.values()) - GAP)
    table = headed()
    sorted_by, _ = SORTS[view.sort]
    for name, size in columns.items():
        table.add_column(
            name,
            header_style="bold" if name == sorted_by else None,
            justify="left" if name in status_page.TEXTS | {"MODEL", "SOURCE"} else "right",
            style="bold" if name == "MODEL" else None,
            no_wrap=True,
            overflow="ellipsis",
            width=size,
        )
    if curve >= _MIN_CURVE:
        table.add_column("HISTORY", no_wrap=True, style="green")
    for model, row in zip(models, rows, strict=True):
        cells = [row[name] for name in columns]
        if curve >= _MIN_CURVE:
            cells.append(spark(list(view.by_model.get(model.name, ())), curve))
        selected = model.name == view.selected
        if selected:
            cells = [Text(str(cell)) for cell in cells]  # colors would interrupt the reverse line
        table.add_row(*cells, style="reverse" if selected else "")
    return table


def _foot(view: View, width: int) -> Text:
    column, _ = SORTS[view.sort]
    text = Text.assemble(
        ("DISPLAY PAUSED  " if view.paused else "", "bold yellow"),
        ("q quit  ↑↓ enter model  s R sort ", "dim"),
        f"{column} {'▼' if view.descending else '▲'}",
        (f"  space pause  ? keys  {view.interval_s:g} s", "dim"),
    )
    clock = time.strftime("%H:%M:%S")
    text.append(" " * max(1, width - text.cell_len - len(clock)) + clock, "dim")
    text.no_wrap, text.overflow = True, "crop"
    return text


def _keys() -> Table:
    table = grid(Column(style="bold", justify="right"), Column())
    for key, meaning in _HELP:
        table.add_row(key, meaning)
    return table


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
