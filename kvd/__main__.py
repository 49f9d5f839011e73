"""`kvd`: the daemon's command line. Parses and hands over; `kvd.daemon.serve` does the work."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvd
from kvd.cli.options import VersionOption, takes_kv
from kvd.cli.usage import Command, Group
from kvd.config.http import HttpSettings, laid_over
from kvd.config.options import Attention, Options
from kvd.daemon.serve import become
from kvd.host import exits
from kvd.host.home import locate
from kvd.host.units import parse_bytes
from protocol.errors import KvdError
from protocol.types import KVSpec

app = typer.Typer(
    help="Serve language models from one memory budget. Talk to it with kvctl.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _http(text: str) -> str:
    try:
        laid_over(HttpSettings(), text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


@app.callback(cls=Group)
def _program(
    *,
    version: VersionOption = False,
) -> None:
    """Keep `serve` a command of its own, also while it is the only one that does something."""


@app.command(cls=Command)
@takes_kv
def serve(
    *,
    home: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Folder of socket, config and logs (default: KVD_HOME, else ~/.kvd).",
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(parser=_size, metavar="SIZE", help="Memory for all models, such as 8GiB."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|PATH|HUB_ID", help="Load at start; may be repeated."),
    ] = None,
    attention: Annotated[
        Attention | None,
        typer.Option(help="What attends; reference: MLX's plain operations (default: auto)."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            parser=_http,
            metavar="[HOST:]PORT|off",
            help="Where OpenAI's HTTP interface answers (default: 127.0.0.1:11711).",
        ),
    ] = None,
    fake: Annotated[
        bool, typer.Option("--fake", metavar="", help="Use the fake engine: no model, no MLX.")
    ] = False,
    kv: KVSpec | None,
) -> None:
    """Serve in the foreground. Ctrl-C or SIGTERM drains and exits 0, a second one forces."""
    if kv and not model:
        raise typer.BadParameter(
            "options of the KV cache are for the models of --model; those of config.toml have "
            "their own there (kv)"
        )
    options = Options(
        home=locate(home),
        budget_bytes=budget,
        models=tuple(model or ()),
        kv=kv or KVSpec(),
        attention=attention,
        http=http,
        fake=fake,
    )
    become(options)


@app.command(cls=Command)
def version() -> None:
    """Print the version."""
    typer.echo(kvd.__version__)


def main() -> None:
    """Run the command line; errors of ours become a line on stderr and an exit code."""
    try:
        app()
    except KvdError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(exits.of(error))


if __name__ == "__main__":
    main()
