"""Draws docs/parts.svg: clients, the daemon and its workers, in light and in dark colors."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

PAGE = "docs/parts.svg"
WIDTH, HEIGHT = 960, 470
STYLE = """\
text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933 }
.name { font-weight: 600 }
.small { font-size: 12px; fill: #52606d }
.mono { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #3e4c59 }
.box { fill: #f5f7fa; stroke: #9aa5b1; stroke-width: 1.2 }
.part { fill: #fff; stroke: #cbd2d9 }
.core { fill: #e6f0ff; stroke: #6b9be8; stroke-width: 1.2 }
.line { stroke: #7b8794; stroke-width: 1.4; fill: none }
.head { fill: #7b8794 }
.weights { fill: #a3b8d9 } .l0 { fill: #2f855a } .l1 { fill: #68b984 } .l2 { fill: #b5dfc3 }
.free { fill: none; stroke: #9aa5b1; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .small { fill: #9aa5b1 } .mono { fill: #cbd2d9 }
  .box { fill: #1f2630; stroke: #52606d } .part { fill: #161b22; stroke: #3e4c59 }
  .core { fill: #14294a; stroke: #4c7fd0 } .line { stroke: #9aa5b1 } .head { fill: #9aa5b1 }
  .weights { fill: #4a6591 } .l0 { fill: #38a169 } .l1 { fill: #2c6e49 } .l2 { fill: #1f4a33 }
  .free { stroke: #616e7c }
}"""


@dataclass
class Drawing:
    """Pieces of SVG, in the order in which they are painted."""

    pieces: list[str]

    def box(self, x: int, y: int, wide: int, high: int, kind: str, radius: int = 8) -> None:
        """Add a rectangle."""
        place = f'x="{x}" y="{y}" width="{wide}" height="{high}" rx="{radius}"'
        self.pieces.append(f'<rect class="{kind}" {place}/>')

    def text(self, x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> None:
        """Add a line of text."""
        self.pieces.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, x: int, y: int, to_x: int, to_y: int, *, both: bool = False) -> None:
        """Add an arrow, or one with two heads."""
        start = ' marker-start="url(#head)"' if both else ""
        self.pieces.append(
            f'<path class="line" d="M{x} {y} L{to_x} {to_y}" marker-end="url(#head)"{start}/>'
        )


def svg() -> str:
    """Return the picture."""
    drawing = Drawing([])
    _clients(drawing)
    _daemon(drawing)
    _workers(drawing)
    _budget(drawing)
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>'
    )
    title = "kvd: clients, one daemon, one worker process for each model, one memory budget"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n<defs>{head}</defs>",
        *drawing.pieces,
        "</svg>\n",
    ])  # fmt: skip


def _clients(drawing: Drawing) -> None:
    for row, (name, how) in enumerate((
        ("OpenAI clients, curl", "HTTP 127.0.0.1:11711"),
        ("Prometheus", "/metrics"),
        ("kvctl, kvd.client", "NDJSON, kvd.sock"),
    )):  # fmt: skip
        y = 30 + 106 * row
        drawing.box(16, y, 200, 74, "box")
        drawing.text(32, y + 31, name, "name")
        drawing.text(32, y + 54, how, "mono")
        drawing.arrow(216, y + 37, 268, y + 37, both=name != "Prometheus")


def _daemon(drawing: Drawing) -> None:
    drawing.box(272, 16, 336, 314, "box", 12)
    drawing.text(292, 44, "the daemon", "name")
    drawing.text(588, 44, "asyncio, no MLX", "small", "end")
    for row, (name, what) in enumerate((
        ("router", "queues requests; loads models on demand"),
        ("governor", "grants memory; frees the cheapest first"),
        ("time slices", "one model computes at a time, 50 ms"),
        ("watchdog", "replaces a worker that hangs"),
        ("journal", "keeps requests across restarts"),
    )):  # fmt: skip
        y = 60 + 52 * row
        drawing.box(288, y, 304, 44, "core" if name == "governor" else "part", 6)
        drawing.text(302, y + 19, name, "name")
        drawing.text(302, y + 36, what, "small")


def _workers(drawing: Drawing) -> None:
    for row, (name, state) in enumerate((
        ("model A", "4 rows decode, 1 prompt in prefill"),
        ("model B", "stepped down to K8V4 for A"),
        ("model C", "idle: unloaded if memory is needed"),
    )):  # fmt: skip
        y = 30 + 106 * row
        drawing.arrow(608, y + 37, 660, y + 37, both=True)
        drawing.box(664, y, 280, 74, "box")
        drawing.text(680, y + 28, f"worker: {name}", "name")
        drawing.text(928, y + 28, "MLX, one process", "small", "end")
        drawing.text(680, y + 52, state, "small")


BUDGET = (
    ("A", (("weights", 150), ("l0", 190))),
    ("B", (("weights", 120), ("l0", 40), ("l1", 66), ("l2", 34))),
    ("C", (("weights", 96), ("l0", 24))),
)
"""Segments of each model in the budget's bar, with their widths in pixels."""
KEYS = (
    ("weights", "weights"),
    ("l0", "pages, K8V8"),
    ("l1", "K8V4"),
    ("l2", "K4V4"),
    ("free", "free"),
)


def _budget(drawing: Drawing) -> None:
    drawing.text(16, 366, "one memory budget", "name")
    x = 16
    for model, parts in BUDGET:
        first = x
        for kind, wide in parts:
            drawing.box(x, 380, wide, 34, kind, 2)
            x += wide
        drawing.text(first + 8, 402, model, "name")
        x += 4
    drawing.box(x, 380, 944 - x, 34, "free", 2)
    x = 16
    for kind, text in KEYS:
        drawing.box(x, 434, 14, 14, kind, 2)
        drawing.text(x + 20, 446, text, "small")
        x += 36 + 8 * len(text)
    drawing.text(944, 446, "the sum of grants never exceeds it", "small", "end")
