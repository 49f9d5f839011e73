"""`kvctl bench-kv`: memory, error and speed of KV schemes on this machine, for a model's geometry.

Needs no daemon: `kvd.worker.tools.bench_kv` measures in a separate process with a worker's
environment. This module starts it and shows the result.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import rich_click as click
from rich.console import Console, RenderableType

from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.completion import model_sources
from kvd.cli.console import print_message, stdout_console
from kvd.cli.options import TokenList
from kvd.cli.tables import GAP, headed
from kvd.cli.tool import run_tool
from kvd.config.sources import absolute
from kvd.host import installed
from protocol.errors import ConfigError, InvalidRequest

SCHEMES = "k16v16,k8v8,k8v4,k4v4"
LENGTHS = "1k,4k,16k"
_SHAPE = click.IntRange(1, 65_536)
_IMAGES = (".png", ".svg")
_COLUMNS = {
    "SCHEME": "scheme",
    "TOKENS": "tokens",
    "B/TOKEN": "bytes_per_token",
    "OF FP16": "share_of_fp16",
    "K ERROR": "k_error",
    "V ERROR": "v_error",
    "OUT ERROR": "output_error",
    "QUANT ms/1K": "quantize_ms_per_1k",
    "REQUANT ms/1K": "requantize_ms_per_1k",
    "ATTEND ms": "attend_ms",
    "DENSE ms": "dense_attend_ms",
}
_DROPPED = ("DENSE ms", "B/TOKEN", "REQUANT ms/1K", "QUANT ms/1K", "V ERROR", "K ERROR")
"""Columns that a narrow table omits, in this order; `--json` has all of them."""


@click.command("bench-kv")
@click.argument(
    "model",
    required=False,
    metavar="[NAME|PATH|HUB_ID]",
    help="The model whose geometry is measured (default: demo).",
    shell_complete=model_sources,
)
@option("--heads", "N", "Query heads.", type=_SHAPE)
@option("--kv-heads", "N", "Key and value heads.", type=_SHAPE)
@option("--head-dim", "N", "Channels of a head.", type=_SHAPE)
@option("--layers", "N", "Layers.", type=_SHAPE)
@option("--dtype", "TYPE", "float32, bfloat16 or float16.")
@option(
    "--schemes",
    "LIST",
    "Schemes; each is measured with the step down to the next one.",
    default=SCHEMES,
)
@option("--lengths", "LIST", "Context lengths, as 1024,4k.", type=TokenList(), default=LENGTHS)
@option("--plot", "FILE", "Draw a .png or .svg; needs matplotlib.", type=click.Path(path_type=Path))
@common_options("json")
def bench_kv(
    common: CommonOptions,
    model: str | None,
    *,
    schemes: str,
    lengths: list[int],
    plot: Path | None,
    **shape: int | str | None,
) -> None:
    """Measure memory, error and times by KV scheme; needs no daemon and no weights."""
    with common.guarded():
        if plot is not None:
            _check_plot(plot)
        given = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in shape.items()
            if value is not None
        ]
        source = absolute(model) if model else None if given else "demo"
        arguments = [*([source] if source else []), *given]
        arguments += ["--schemes", schemes, "--lengths", ",".join(map(str, lengths))]
        result = run_tool("bench_kv", arguments, quiet=common.json)
        show(result, common)
        if plot is not None:
            draw(result, plot)
            print_message("plot written to {}", plot)


def show(result: dict[str, Any], common: CommonOptions) -> None:
    if common.json:
        common.print_json(result)
        return
    shape = result["shape"]
    print_message(
        f"{shape['layers']} layers, {shape['heads']} heads, {shape['kv_heads']} KV heads of "
        f"{shape['head_dim']}, {shape['dtype']}; times are for all layers and one row"
    )
    console = stdout_console()
    console.print(table(result, console))


def table(result: dict[str, Any], console: Console) -> RenderableType:
    """Return a table by scheme and length, with the columns that fit."""
    rows = [
        {name: _cell(key, measured[key]) for name, key in _COLUMNS.items()}
        for measured in result["results"]
    ]
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) + GAP for name in _COLUMNS}
    shown = list(_COLUMNS)
    for name in _DROPPED:
        if sum(sizes[column] for column in shown) <= console.width:
            break
        shown.remove(name)
    output = headed()
    for name in shown:
        output.add_column(name, justify="left" if name == "SCHEME" else "right", no_wrap=True)
    tokens = None
    for row in rows:
        if tokens not in {None, row["TOKENS"]}:
            output.add_row()
        tokens = row["TOKENS"]
        output.add_row(*(row[name] for name in shown))
    return output


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_error"):
        return f"{value:.2%}" if value >= 0.00005 else "0"
    if key == "share_of_fp16":
        return f"{value:.3f}"
    if isinstance(value, float):
        return f"{value:.0f}" if key == "bytes_per_token" else f"{value:.2f}"
    return str(value)


def _check_plot(file: Path) -> None:
    if file.suffix not in _IMAGES:
        raise InvalidRequest(f"--plot takes a {' or '.join(_IMAGES)} file", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        command = installed.find().command("plot")
        raise ConfigError(f"--plot needs matplotlib; install it: {command}", key="plot")


def draw(result: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    rows = result["results"]
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    longest = max(row["tokens"] for row in rows)
    at_end = {row["scheme"]: row for row in rows if row["tokens"] == longest}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.bar(schemes, [at_end[name]["share_of_fp16"] for name in schemes], color="#4477aa")
    left.set(title="Memory", ylabel="bytes per token, share of fp16")
    errors = {"keys": "k_error", "values": "v_error", "attention output": "output_error"}
    for index, (label, key) in enumerate(errors.items()):
        positions = [number + (index - 1) * 0.27 for number in range(len(schemes))]
        middle.bar(positions, [at_end[name][key] * 100 for name in schemes], 0.27, label=label)
    middle.set_xticks(range(len(schemes)), schemes)
    middle.set(title=f"Error at {longest} tokens", ylabel="relative, %")
    middle.legend()
    for name in schemes:
        points = [row for row in rows if row["scheme"] == name]
        right.plot(
            [row["tokens"] for row in points],
            [row["attend_ms"] for row in points],
            "o-",
            label=name,
        )
    right.set(title="Attention, one row", xlabel="context, tokens", ylabel="ms per step")
    right.legend()
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", key="plot") from error
    finally:
        plt.close(figure)
