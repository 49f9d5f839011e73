"""Tables as all commands print them: no lines, two spaces between columns."""

from __future__ import annotations

from functools import partial

from rich.table import Column, Table

GAP = 2
headed = partial(Table, box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
grid = partial(Table.grid, padding=(0, GAP, 0, 0))
text_column = partial(Column, overflow="fold")
fixed_column = partial(Column, no_wrap=True)
number_column = partial(Column, no_wrap=True, justify="right")


def named_values() -> Table:
    return grid(fixed_column(style="dim"), text_column())
