"""What `kvctl top` shows. Pure: a status, events, and what was chosen by keys; out comes a page."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvd.cli import model_page, status_page
from kvd.cli.events import line as event_line
from protocol.types import ModelStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from protocol.messages import EventRecord
    from protocol.types import DaemonStatus

SORTS: dict[str, tuple[str, Callable[[ModelStatus], Any]]] = {
    "n": ("MODEL", lambda it: it.name),
    "a": ("STATE", lambda it: it.state),
    "r": ("ROWS", lambda it: it.stats.rows_running + it.stats.rows_prefilling),
    "w": ("WAIT", status_page.waiting),
    "t": ("TOK/S", lambda it: it.stats.tokens_per_s),
    "k": ("KV", lambda it: it.stats.memory.kv_pages_used + it.stats.memory.kv_tails),
    "m": ("GRANTED", lambda it: it.granted_bytes),
}
"""By key: the column, and what it is sorted by; texts go up, numbers down."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_KEPT = 240
"""Readings of the past that curves are drawn of."""
_MOST_EVENTS = 16
_STEADY = {"ROWS": 4, "TOK/S": 6, "KV": 8, "LEVELS": 9, "GRANTED": 8, "MEMORY": 8, "PAGES": 9}
"""Cells of columns whose numbers change all the time: else the table would tremble."""
_NAME = 24
"""Cells that a name has before another column is shown, if it needs them."""
_SHORTEST_CURVE, _LONGEST_CURVE = 10, 40
_GAP = 2
_HELP = (
    ("q", "quit"),
    ("↑ ↓", "choose a model"),
    ("enter", "all about it; again, or escape: back"),
    *((key, f"sort by {column.lower()}") for key, (column, _) in SORTS.items()),
    ("s", "sort by the next column"),
    ("R", "the other way round"),
    ("space", "hold still; again: go on"),
    ("+ -", "look less, more often"),
    ("?", "this page"),
)


@dataclass
class View:
    """What was chosen, and what is remembered to draw curves."""

    sort: str = "t"
    reverse: bool = False
    chosen: str | None = None
    """A model's name."""
    page: str = "models"
    """``models``, ``model`` or ``help``."""
    paused: bool = False
    away: str = ""
    """Why nothing new comes; empty: it does."""
    interval_s: float = 1.0
    total: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Tokens a second of all models, the newest last."""
    each: dict[str, deque[float]] = field(default_factory=dict)
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, status: DaemonStatus, news: Sequence[EventRecord]) -> None:
        """Remember what is new."""
        self.away = ""
        self.events.extend(news)
        self.total.append(sum(model.stats.tokens_per_s for model in status.models))
        there = {model.name for model in status.models}
        for gone in self.each.keys() - there:
            del self.each[gone]
        for model in status.models:
            self.each.setdefault(model.name, deque(maxlen=_KEPT)).append(model.stats.tokens_per_s)

    def press(self, key: str, status: DaemonStatus | None) -> None:
        """Do what a key stands for; other keys do nothing."""
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
            self._choose(key, [model.name for model in self.sorted(status.models)])

    def _choose(self, key: str, names: list[str]) -> None:
        at = names.index(self.chosen) if self.chosen in names else None
        steps = {"down": 1, "up": -1, "page down": 10, "page up": -10}
        if key in steps:
            start = -1 if key.endswith("down") else len(names)
            at = (start if at is None else at) + steps[key]
        elif key in {"home", "end"}:
            at = 0 if key == "home" else len(names) - 1
        elif key == "enter":
            at = 0 if at is None else at
            self.page = "models" if self.page == "model" else "model"
        if at is not None:
            self.chosen = names[min(len(names) - 1, max(0, at))]

    def sorted(self, models: Sequence[ModelStatus]) -> list[ModelStatus]:
        """Return the models in the order that was chosen; of equals by name."""
        _, by = SORTS[self.sort]
        return sorted(sorted(models, key=lambda it: it.name), key=by, reverse=self.falls)

    @property
    def falls(self) -> bool:
        """Whether the largest is the first."""
        return (self.sort not in {"n", "a"}) != self.reverse


def page(view: View, status: DaemonStatus | None, width: int, height: int) -> RenderableType:
    """Return what fills the screen."""
    if view.page == "help":
        return Group(_keys(), Text("\n? or escape goes back", "dim"))
    if status is None:
        return Group(Text(view.away or "…", "yellow"), Text("\nq quits", "dim"))
    head = _head(view, status, width)
    room = max(2, height - len(head) - 2)
    chosen = next((model for model in status.models if model.name == view.chosen), None)
    if view.page == "model" and chosen is not None:
        return Group(*head, Text(), model_page.page(chosen))
    return Group(*head, Text(), *_body(view, status, width, room), _foot(view, width))


def _head(view: View, status: DaemonStatus, width: int) -> list[Text]:
    rows = sum(it.stats.rows_running + it.stats.rows_prefilling for it in status.models)
    waits = sum(status_page.waiting(it) for it in status.models)
    paused = sum(it.paused for it in status.models)
    counts = f"{_count(len(status.models), 'model')}, {_count(rows, 'row')}"
    counts += f", {waits} waiting" if waits else ""
    counts += f", {paused} parked" if paused else ""
    now = view.total[-1] if view.total else 0.0
    speed = Text.assemble("tok/s  ", (f"{now:,.0f} ", "bold"), f" {counts}  ")
    curve = spark(list(view.total), max(0, width - speed.cell_len))
    lines = [
        status_page.daemon(status),
        status_page.budget(status, width),
        speed.append(curve, "green"),
    ]
    if view.away:
        lines.append(Text(f"{view.away}; this is how it was", "bold yellow"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def spark(values: Sequence[float], cells: int) -> str:
    """Return a curve of the newest values, a cell each; its top is the highest of them."""
    shown = list(values)[-cells:] if cells > 0 else []
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[max(1, round(one / top * steps)) if one > 0 else 0] for one in shown)


def _body(view: View, status: DaemonStatus, width: int, room: int) -> list[RenderableType]:
    """Return the models, their troubles and the newest events, in so many lines."""
    if not status.models:
        return [Text("no models; load one with `kvctl load demo`", "dim"), Text()]
    models = view.sorted(status.models)
    troubles = [_line(status_page.trouble_line(it)) for it in models if it.error][
        : max(0, room // 4)
    ]
    events = list(view.events)[-min(_MOST_EVENTS, max(0, room - len(models) - len(troubles) - 3)) :]
    if room - len(models) - len(troubles) <= 3:
        events = []
    left = room - 1 - len(troubles) - (len(events) + 1 if events else 0)
    first = _first(models, view.chosen, left)
    parts: list[RenderableType] = [_models(view, models[first : first + left], width)]
    parts += troubles
    used = 1 + min(len(models), left) + len(troubles)
    filler = room - used - (len(events) + 1 if events else 0)
    if events:
        parts += [Text(), *(_line(event_line(it)) for it in events)]
    return parts + [Text()] * max(0, filler)


def _first(models: list[ModelStatus], chosen: str | None, left: int) -> int:
    """Return the first model to show, so that the chosen one is among them."""
    at = next((n for n, model in enumerate(models) if model.name == chosen), 0)
    return max(0, min(at - left // 2, len(models) - left))


def _models(view: View, models: list[ModelStatus], width: int) -> Table:
    rows = [status_page.cells(model) for model in models]
    longest = max(len("MODEL"), *(len(model.name) for model in models))
    shown = status_page.fitting(rows, width, {**_STEADY, "MODEL": min(_NAME, longest)})
    used = sum(size + _GAP for size in shown.values())
    shown["MODEL"] = min(longest, shown["MODEL"] + max(0, width - used))
    curve = min(_LONGEST_CURVE, width - sum(size + _GAP for size in shown.values()) - _GAP)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    sorted_by, _ = SORTS[view.sort]
    for name, size in shown.items():
        table.add_column(
            name,
            header_style="bold" if name == sorted_by else None,
            justify="left" if name in status_page.TEXTS | {"MODEL", "SOURCE"} else "right",
            style="bold" if name == "MODEL" else None,
            no_wrap=True,
            overflow="ellipsis",
            width=size,
        )
    if curve >= _SHORTEST_CURVE:
        table.add_column("LATELY", no_wrap=True, style="green")
    for model, row in zip(models, rows, strict=True):
        found = [row[name] for name in shown]
        if curve >= _SHORTEST_CURVE:
            found.append(spark(list(view.each.get(model.name, ())), curve))
        if model.name == view.chosen:
            found = [Text(str(cell)) for cell in found]  # colours of their own would tear it
        table.add_row(*found, style="reverse" if model.name == view.chosen else "")
    return table


def _foot(view: View, width: int) -> Text:
    column, _ = SORTS[view.sort]
    text = Text.assemble(
        ("HELD STILL  " if view.paused else "", "bold yellow"),
        ("q quit  ↑↓ enter model  s R sort ", "dim"),
        f"{column} {'▼' if view.falls else '▲'}",
        (f"  space hold  ? keys  {view.interval_s:g} s", "dim"),
    )
    clock = time.strftime("%H:%M:%S")
    text.append(" " * max(1, width - text.cell_len - len(clock)) + clock, "dim")
    text.no_wrap, text.overflow = True, "crop"
    return text


def _keys() -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="bold", justify="right")
    table.add_column()
    for key, meaning in _HELP:
        table.add_row(key, meaning)
    return table


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
