"""`kvctl explain`: what rows of a model need, whether they fit, and what would make room."""

from __future__ import annotations

from collections.abc import Iterator

import rich_click as click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.cli.common import CommonOptions, common_options, model_name, option, standard_panels
from kvd.cli.explain_request import explain_requests
from kvd.cli.options import Tokens, kv_options
from kvd.cli.tables import fixed_column, grid, headed, number_column, text_column
from kvd.config.sources import absolute
from kvd.host.units import format_bytes, format_duration
from protocol.explain_messages import MAX_FORECAST_ROWS
from protocol.fields import MAX_DEVICES, MAX_RANKS
from protocol.forecast import Forecast, ReclaimStep
from protocol.kv import KVSpec

_METHODS = {
    "spare": "take back memory that {} does not need",
    "prefixes": "drop cached prompts of {}",
    "expired": "unload {}, idle for longer than its limit",
    "precision": "step rows of {} down to level {level}",
    "idle": "unload {}, which is idle",
    "preempt": "preempt rows of {}",
}
_STYLES = {"fits": "green", "makes_room": "yellow", "waits": "yellow", "never": "bold red"}


@click.command(panels=standard_panels())
@model_name("The name of a known model, or a model to load.", required=False)
@click.option(
    "--request",
    "request",
    metavar="ID",
    is_flag=False,
    flag_value="",
    help="Show what the prefix cache did for a request, and why; without ID, list the newest ones.",
)
@click.option(
    "--ctx",
    "context",
    metavar="TOKENS",
    type=Tokens(1),
    help="Prompt and completion of a row, such as 64k (default: the model's whole context).",
)
@option("--rows", "N", "Concurrent requests.", type=click.IntRange(0, MAX_FORECAST_ROWS), default=1)
@option(
    "--ranks",
    "N",
    "Processes that would share the model (default: that of the known model, otherwise 1).",
    type=click.IntRange(1, MAX_RANKS),
)
@option(
    "--device",
    "N",
    "GPU of the model, or of its first rank (default: that of the known model, otherwise 0).",
    type=click.IntRange(0, MAX_DEVICES - 1),
)
@kv_options()
@common_options()
def explain(
    common: CommonOptions,
    model: str | None,
    *,
    request: str | None,
    context: int | None,
    rows: int,
    ranks: int | None,
    device: int | None,
    kv: KVSpec | None,
) -> None:
    """Show the memory that rows of a model would need, and what would make room for them.

    With --request, show why the tokens of a prompt were computed instead of found in the cache.
    """
    if request is not None:
        explain_requests(common, request or None, model)
        return
    if model is None:
        raise click.UsageError("give MODEL, or --request to explain a request's prompt")
    with common.connected() as client:
        forecast = client.explain(
            absolute(model), rows=rows, context=context, kv=kv, ranks=ranks, device=device
        )
        common.print_data(forecast, page(forecast, context, rows))


def page(forecast: Forecast, context: int | None = None, rows: int = 0) -> RenderableType:
    """Return the page. ``context`` and ``rows`` are as asked for; the forecast's may be lower."""
    parts: list[RenderableType] = [_head(forecast), *_limits(forecast, context, rows)]
    parts += [Text(), _memory(forecast), *_stored(forecast), Text()]
    parts += [_levels(forecast), Text(), _verdict(forecast)]
    if forecast.steps:
        parts.append(_steps(forecast.steps))
    if forecast.verdict == "waits":
        short = format_bytes(forecast.shortfall_bytes)
        parts.append(Text(f"{short} would still be missing: requests wait until others end."))
    return Group(*parts)


def _stored(forecast: Forecast) -> Iterator[Text]:
    if (stored := forecast.stored) is not None:
        size = f"{stored.tokens:,} prompt tokens in {format_bytes(stored.nbytes)}"
        saved = format_duration(max(0.0, stored.saved_s))
        yield Text(f"On disk are {size}; {stored.hits:,} prompts read some, which saved {saved}.")


def _head(forecast: Forecast) -> Text:
    source = "measured by its worker" if forecast.measured else "estimated from its files"
    return Text.assemble((forecast.model, "bold"), f"  {forecast.state}, {source}")


def _limits(forecast: Forecast, context: int | None, rows: int) -> Iterator[Text]:
    if context is not None and context > forecast.context:
        limit = f"Its context is {forecast.context:,} tokens; longer requests are refused."
        yield Text(limit, style="yellow")
    if rows > forecast.rows:
        limit = f"At most {_rows(forecast)} run at once (max_rows); more requests wait."
        yield Text(limit, style="yellow")


def _of_device(number: int | None) -> str:
    return "" if number is None else f"of GPU {number}; all numbers are those of one GPU"


def _memory(forecast: Forecast) -> Table:
    table = grid(fixed_column(style="dim"), number_column(), text_column(style="dim"))
    lines = [
        ("weights", forecast.weights_bytes, ""),
        ("base", forecast.base_bytes, "weights, interpreter and scratch while it is loaded"),
        ("idle", forecast.idle_bytes, "base and the first pages"),
        ("budget", forecast.budget_bytes, _of_device(forecast.device)),
        ("free", forecast.available_bytes, "not granted"),
    ]
    if start_bytes := forecast.levels[forecast.level].start_bytes:
        lines.append(("row at first", start_bytes, "of a short prompt; then it grows"))
    if forecast.held_bytes:
        lines.append(("granted", forecast.held_bytes, "to this model now"))
    for name, nbytes, meaning in lines:
        table.add_row(name, format_bytes(nbytes), meaning)
    return table


def _levels(forecast: Forecast) -> Table:
    numbers = ("PER TOKEN", "PER ROW", _rows(forecast).upper(), "MAX ROWS")
    table = headed(fixed_column("LEVEL"), *map(number_column, numbers))
    for number, level in enumerate(forecast.levels):
        table.add_row(
            f"{number}  {level.scheme}",
            format_bytes(round(level.token_bytes)),
            format_bytes(level.row_bytes),
            format_bytes(level.total_bytes),
            f"{level.max_rows:,}",
            style="" if level.total_bytes <= forecast.budget_bytes else "red",
        )
    return table


def _rows(forecast: Forecast) -> str:
    return f"{forecast.rows:,} row" + ("" if forecast.rows == 1 else "s")


def _verdict(forecast: Forecast) -> Text:
    level, lowest = forecast.levels[forecast.level], forecast.levels[-1]
    rows = f"{_rows(forecast)} of {forecast.context:,} tokens"
    total, missing = format_bytes(level.total_bytes), format_bytes(forecast.missing_bytes)
    needs = f"{rows} at {level.scheme}: needs {total} in total, {missing} more than is free."
    text = {
        "fits": f"{rows} at {level.scheme}: fits now ({total} in total).",
        "makes_room": f"{needs} These steps would make room:",
        "waits": needs + (" These steps would free a part:" if forecast.steps else ""),
        "never": f"{rows}: never fits. Even {lowest.scheme} needs"
        f" {format_bytes(lowest.total_bytes)} of a budget of"
        f" {format_bytes(forecast.budget_bytes)}, which holds at most {lowest.max_rows:,} rows.",
    }[forecast.verdict]
    return Text(text, style=_STYLES[forecast.verdict])


def describe_step(step: ReclaimStep) -> str:
    """Return what the step does, as an imperative."""
    return _METHODS[step.method].format(step.model, level=step.level)


def _steps(steps: list[ReclaimStep]) -> Table:
    table = grid(number_column(style="dim"), text_column(), number_column())
    for number, step in enumerate(steps, 1):
        table.add_row(f"{number}.", describe_step(step), format_bytes(step.nbytes))
    return table
