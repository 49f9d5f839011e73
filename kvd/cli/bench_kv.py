"""`kvctl bench-kv`: what KV schemes cost and lose on this machine, for a model's geometry.

Needs no daemon: the measuring runs in a process of its own (`kvd.worker.tools.bench_kv`) with the
environment that workers get. This file starts it and shows what it says.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from kvd.cli.common import JsonOption, Terms, stdout_console, talk, terms
from kvd.cli.tool import run_tool
from kvd.config.sources import absolute
from protocol.errors import ConfigError, InvalidRequest

SCHEMES = "k16v16,k8v8,k8v4,k4v4"
LENGTHS = "1024,4096,16384"
_IMAGES = (".png", ".svg")
_GAP = 2
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
"""What is left out of a narrow table, in this order; `--json` has it all."""


def bench_kv(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="NAME|PATH|HUB_ID", help="Whose geometry (default: demo)."),
    ] = None,
    *,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Query heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", metavar="N", help="Heads of keys and values.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", help="Channels of a head.")
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Layers.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")
    ] = None,
    schemes: Annotated[
        str, typer.Option(metavar="LIST", help="Schemes, each measured on its way to the next.")
    ] = SCHEMES,
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="Context lengths: 1024,4k.")
    ] = LENGTHS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a .png or .svg; needs 'kvd[plot]'.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure memory, error and times by KV scheme; needs no daemon and no weights."""
    wanted = terms(context, None, None, json=json)
    with wanted.guarded():
        if plot is not None:
            _check_plot(plot)
        shape = {
            "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim, "layers": layers,
            "dtype": dtype,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in shape.items() if value is not None]
        whose = absolute(model) if model else None if given else "demo"
        arguments = [*([whose] if whose else []), *given]
        arguments += ["--schemes", schemes, "--lengths", lengths]
        result = run_tool("kvd.worker.tools.bench_kv", arguments, quiet=wanted.json)
        show(result, wanted)
        if plot is not None:
            draw(result, plot)
            talk("drawn: {}", plot)


def show(result: dict[str, Any], wanted: Terms) -> None:
    """Print the result, as JSON or as a table."""
    if wanted.json:
        wanted.print_json(result)
        return
    shape = result["shape"]
    talk(
        f"{shape['layers']} layers, {shape['heads']} heads, {shape['kv_heads']} KV heads of "
        f"{shape['head_dim']}, {shape['dtype']}; times are of all layers, one row"
    )
    console = stdout_console()
    console.print(table(result, console))


def table(result: dict[str, Any], console: Console) -> RenderableType:
    """Return the results by scheme and length, with the columns that fit."""
    rows = [{name: _cell(key, one[key]) for name, key in _COLUMNS.items()}
            for one in result["results"]]  # fmt: skip
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) + _GAP for name in _COLUMNS}
    shown = list(_COLUMNS)
    for name in _DROPPED:
        if sum(sizes[one] for one in shown) <= console.width:
            break
        shown.remove(name)
    found = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for name in shown:
        found.add_column(name, justify="left" if name == "SCHEME" else "right", no_wrap=True)
    tokens = None
    for row in rows:
        if tokens not in {None, row["TOKENS"]}:
            found.add_row()
        tokens = row["TOKENS"]
        found.add_row(*(row[name] for name in shown))
    return found


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
        raise ConfigError("--plot needs matplotlib: pip install 'kvd[plot]'", key="plot")


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw bytes, error and attend time."""
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of the backend

    rows = result["results"]
    schemes = list(dict.fromkeys(one["scheme"] for one in rows))
    longest = max(one["tokens"] for one in rows)
    at_end = {one["scheme"]: one for one in rows if one["tokens"] == longest}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.bar(schemes, [at_end[name]["share_of_fp16"] for name in schemes], color="#4477aa")
    left.set(title="Memory", ylabel="bytes per token, share of fp16")
    errors = {"keys": "k_error", "values": "v_error", "attention output": "output_error"}
    for index, (label, key) in enumerate(errors.items()):
        places = [place + (index - 1) * 0.27 for place in range(len(schemes))]
        middle.bar(places, [at_end[name][key] * 100 for name in schemes], 0.27, label=label)
    middle.set_xticks(range(len(schemes)), schemes)
    middle.set(title=f"Error at {longest} tokens", ylabel="relative, %")
    middle.legend()
    for name in schemes:
        mine = [one for one in rows if one["scheme"] == name]
        right.plot(
            [one["tokens"] for one in mine], [one["attend_ms"] for one in mine], "o-", label=name
        )
    right.set(title="Attention, one row", xlabel="context, tokens", ylabel="ms per step")
    right.legend()
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", key="plot") from error
    finally:
        plt.close(figure)
