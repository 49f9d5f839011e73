"""The commands of `kvctl`, a line each; what they do is in modules of their own."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

import typer

from kvd.cli.common import HomeOption, JsonOption, SocketOption, Terms
from kvd.cli.lazy import Lazy, lazy_group
from kvd.cli.options import VersionOption
from kvd.host.exits import Exit

if TYPE_CHECKING:
    from types import FrameType

_WATCH, _MODELS, _TEXT = "Watch", "Models and memory", "Text"
_DAEMON, _MEASURE = "The daemon", "Measure, without the daemon"

COMMANDS = (
    Lazy("status", "kvd.cli.status:status", _WATCH),
    Lazy("top", "kvd.cli.top:top", _WATCH),
    Lazy("events", "kvd.cli.events:events", _WATCH),
    Lazy("logs", "kvd.cli.logs:logs", _WATCH),
    Lazy("metrics", "kvd.cli.metrics:metrics", _WATCH),
    Lazy("models", "kvd.cli.models:models", _MODELS),
    Lazy("load", "kvd.cli.load:load", _MODELS),
    Lazy("unload", "kvd.cli.load:unload", _MODELS),
    Lazy("pin", "kvd.cli.events:pin", _MODELS),
    Lazy("unpin", "kvd.cli.events:unpin", _MODELS),
    Lazy("explain", "kvd.cli.explain:explain", _MODELS),
    Lazy("generate", "kvd.cli.generate:generate", _TEXT),
    Lazy("chat", "kvd.cli.chat:chat", _TEXT),
    Lazy("tokenize", "kvd.cli.tokenize:tokenize", _TEXT),
    Lazy("attach", "kvd.cli.generate:attach", _TEXT),
    Lazy("config", "kvd.cli.config:app", _DAEMON),
    Lazy("key", "kvd.cli.api_keys:app", _DAEMON),
    Lazy("drain", "kvd.cli.shutdown:drain", _DAEMON),
    Lazy("shutdown", "kvd.cli.shutdown:shutdown", _DAEMON),
    Lazy("service", "kvd.cli.service:app", _DAEMON),
    Lazy("doctor", "kvd.cli.doctor:doctor", _DAEMON),
    Lazy("bench-kv", "kvd.cli.bench_kv:bench_kv", _MEASURE),
    Lazy("calibrate", "kvd.cli.calibrate:calibrate", _MEASURE),
)
"""In the order of the help page."""

app = typer.Typer(
    name="kvctl",
    help="Talk to the kvd daemon.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 no daemon, 5 config, 6 refused, 7 retry, "
    "130 Ctrl-C. Data is on stdout, talk on stderr; NO_COLOR=1 leaves colours out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(cls=lazy_group(COMMANDS))
def _program(
    context: typer.Context,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
    version: VersionOption = False,  # noqa: ARG001 - the callback has done it
) -> None:
    context.obj = Terms(home, socket, json)


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    """Unwind: the terminal is given back as it was, and what was started ends too."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the second one ends us at once
    raise SystemExit(Exit.TERMINATED)
