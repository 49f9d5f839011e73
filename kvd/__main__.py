"""`kvd`: the daemon's command line. `kvd.daemon.serve` runs the daemon itself."""

from __future__ import annotations

import os
import sys
from typing import get_args

import rich_click as click

import kvd
from kvd.cli.common import Group, option, standard_panels
from kvd.cli.options import kv_options, parse_budget
from kvd.config import variables
from kvd.config.options import Attention, Options
from kvd.daemon.serve import become
from kvd.host import exits
from kvd.host.home import locate
from protocol.errors import KvdError
from protocol.kv import KVSpec


@click.group("kvd", cls=Group, no_args_is_help=True)
@click.version_option(kvd.__version__, message="%(version)s", help="Print the version.")
def app() -> None:
    """Serve language models from one memory budget. kvctl controls the daemon."""


@app.command(panels=standard_panels())
@option("--home", "PATH", "Folder of socket, config and logs (default: KVD_HOME, else ~/.kvd).")
@option(
    "--budget",
    "SIZE",
    "Memory for all models, such as 8GiB (default: KVD_BUDGET, else config.toml).",
    callback=parse_budget,
)
@option("--model", "NAME|PATH|HUB_ID", "Load at start; repeatable.", name="models", multiple=True)
@click.option(
    "--attention",
    type=click.Choice(get_args(Attention)),
    help="Attention backend; reference: plain MLX operations (default: auto).",
)
@option("--host", "ADDRESS", "Address or name that HTTP listens on (default: 127.0.0.1).")
@option(
    "--port",
    "PORT",
    "Port of HTTP, 0 for any free one (default: KVD_PORT, else config.toml, else 11711).",
    type=click.IntRange(0, 65535),
)
@click.option("--no-http", is_flag=True, help="Serve no HTTP.")
@click.option("--fake", is_flag=True, help="Use the fake engine: no model, no MLX.")
@kv_options()
def serve(
    *,
    home: str | None,
    budget: int | None,
    models: tuple[str, ...],
    attention: Attention | None,
    host: str | None,
    port: int | None,
    no_http: bool,
    fake: bool,
    kv: KVSpec | None,
) -> None:
    """Serve in the foreground. Ctrl-C or SIGTERM drains and exits 0; a second one exits at once."""
    if kv and not models:
        raise click.BadParameter(
            "the KV cache options apply only to models given with --model, and none was given; "
            "for a model in config.toml, use its setting kv"
        )
    try:
        budget = variables.budget_of(os.environ) if budget is None else budget
        unused = no_http or port is not None
        default_port = None if unused else variables.port_of(os.environ)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    options = Options(
        home=locate(home),
        budget_bytes=budget,
        models=models,
        kv=kv,
        attention=attention,
        host=host,
        port=port,
        default_port=default_port,
        no_http=no_http,
        fake=fake,
    )
    become(options)


@app.command()
def version() -> None:
    """Print the version."""
    click.echo(kvd.__version__)


def main() -> None:
    """Run the command line; report a `KvdError` on stderr and exit with its code."""
    try:
        app()
    except KvdError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(exits.of(error))


if __name__ == "__main__":
    main()
