"""`kvctl ps`: one line for each loaded model; `kvctl status` shows the whole daemon."""

from __future__ import annotations

import rich_click as click
from rich.table import Table
from rich.text import Text

from kvd.cli import status_page
from kvd.cli.common import CommonOptions, common_options
from kvd.cli.tables import fixed_column, headed, number_column, text_column
from kvd.host.units import format_bytes, format_duration
from protocol.types import ModelStatus


@click.command()
@common_options()
def ps(common: CommonOptions) -> None:
    """Show the loaded models: memory, precision level, rows, and until when they stay."""
    with common.connected() as client:
        models = client.status().models
        common.print_data(models, page(models))


def page(models: list[ModelStatus]) -> Table:
    table = headed(
        text_column("MODEL", style="bold"),
        fixed_column("STATE"),
        number_column("MEMORY"),
        fixed_column("LEVELS"),
        number_column("ROWS"),
        fixed_column("UNTIL"),
    )
    for model in models:
        memory = format_bytes(model.granted_bytes)
        rows = str(status_page.rows(model))
        state, levels = status_page.state(model), status_page.levels(model)
        table.add_row(Text(model.name), state, memory, levels, rows, until(model))
    return table


def until(model: ModelStatus) -> str:
    """Return when a model is unloaded if no request arrives."""
    if model.expires_in_s is not None:
        return f"in {format_duration(model.expires_in_s)}"
    if model.pinned:
        return "unpinned"
    return "memory is needed" if model.state == "ready" else ""
