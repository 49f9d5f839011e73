"""The commands of `kvctl` and where each is defined."""

from __future__ import annotations

import difflib
import importlib
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import Any, NoReturn

import rich_click as click

import kvd
from kvd.cli.common import CommonOptions, Group, common_options
from kvd.cli.shell_setup import completion_options
from kvd.host.exits import Exit


@dataclass(frozen=True)
class LazyCommand:
    """A command or a group of commands, and where it is defined."""

    name: str
    target: str
    """``module:attribute``."""
    panel: str
    """Section of the group's help page."""
    aliases: tuple[str, ...] = ()
    """Other names, for habits from other tools."""


_WATCH, _MODELS, _TEXT = "Watch", "Models and memory", "Text"
_DAEMON, _MEASURE = "The daemon", "Measure, without the daemon"

COMMANDS = (
    LazyCommand("status", "kvd.cli.status:status", _WATCH),
    LazyCommand("ps", "kvd.cli.ps:ps", _WATCH),
    LazyCommand("top", "kvd.cli.top:top", _WATCH),
    LazyCommand("events", "kvd.cli.events:events", _WATCH),
    LazyCommand("logs", "kvd.cli.logs:logs", _WATCH),
    LazyCommand("metrics", "kvd.cli.metrics:metrics", _WATCH),
    LazyCommand("bench", "kvd.cli.bench:bench", _WATCH),
    LazyCommand("models", "kvd.cli.models:models", _MODELS, ("list",)),
    LazyCommand("pull", "kvd.cli.pull:pull", _MODELS),
    LazyCommand("load", "kvd.cli.load:load", _MODELS),
    LazyCommand("unload", "kvd.cli.load:unload", _MODELS, ("stop",)),
    LazyCommand("rm", "kvd.cli.rm:rm", _MODELS),
    LazyCommand("pin", "kvd.cli.load:pin", _MODELS),
    LazyCommand("unpin", "kvd.cli.load:unpin", _MODELS),
    LazyCommand("cache", "kvd.cli.cache:cache", _MODELS),
    LazyCommand("explain", "kvd.cli.explain:explain", _MODELS),
    LazyCommand("run", "kvd.cli.run:run", _TEXT),
    LazyCommand("generate", "kvd.cli.generate:generate", _TEXT),
    LazyCommand("chat", "kvd.cli.chat:chat", _TEXT),
    LazyCommand("launch", "kvd.cli.launch:launch", _TEXT),
    LazyCommand("tokenize", "kvd.cli.tokenize:tokenize", _TEXT),
    LazyCommand("attach", "kvd.cli.generate:attach", _TEXT),
    LazyCommand("config", "kvd.cli.config:config", _DAEMON),
    LazyCommand("reload", "kvd.cli.config:reload", _DAEMON),
    LazyCommand("key", "kvd.cli.api_keys:key", _DAEMON),
    LazyCommand("drain", "kvd.cli.shutdown:drain", _DAEMON),
    LazyCommand("shutdown", "kvd.cli.shutdown:shutdown", _DAEMON),
    LazyCommand("service", "kvd.cli.service:service", _DAEMON),
    LazyCommand("doctor", "kvd.cli.doctor:doctor", _DAEMON),
    LazyCommand("bench-kv", "kvd.cli.bench_kv:bench_kv", _MEASURE),
    LazyCommand("calibrate", "kvd.cli.calibrate:calibrate", _MEASURE),
)
"""In the order of the help page."""
_EPILOG = (
    "Exit codes: 0 success, 1 failed, 2 usage, 3 no daemon, 5 config, 6 refused, 7 retry, "
    "130 Ctrl-C. Data goes to stdout, messages to stderr. NO_COLOR=1 turns colors off."
)


class LazyGroup(Group):
    """Imports a command's module only when the command is used; help lists commands by panel."""

    def __init__(self, *args: Any, lazy_commands: Iterable[LazyCommand], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._lazy = {command.name: command for command in lazy_commands}
        self._names = {
            name: command
            for command in self._lazy.values()
            for name in (command.name, *command.aliases)
        }
        for panel, commands in groupby(self._lazy.values(), lambda command: command.panel):
            names = [command.name for command in commands]
            self.add_panel(click.RichCommandPanel(panel, commands=names))

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in self._names:
            return None
        module, _, attribute = self._names[cmd_name].target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, or suggest a similar name; click would suggest only imported commands."""
        if args[0] not in self._names and not ctx.resilient_parsing:
            similar = difflib.get_close_matches(args[0], self._names)
            if similar:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {similar[0]!r}?")
        return super().resolve_command(ctx, args)


@click.group(
    "kvctl",
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    epilog=_EPILOG,
    no_args_is_help=True,
    context_settings={"show_default": True},
)
@common_options()
@click.version_option(kvd.__version__, message="%(version)s", help="Print the version.")
@completion_options
@click.pass_context
def app(context: click.Context, *, common: CommonOptions) -> None:
    """Control the kvd daemon."""
    context.obj = common


def main() -> None:
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise `SystemExit`, so that the terminal is restored and child processes are ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
    raise SystemExit(Exit.TERMINATED)
