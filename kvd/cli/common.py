"""The options that all commands share, and how every command reports errors."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click
from rich.console import RenderableType

from kvd.cli import completion
from kvd.cli.console import discard_output, print_message, stdout_console, write
from kvd.cli.hints import hints
from kvd.cli.ranges import Count
from kvd.client import Client
from kvd.host import exits
from kvd.host.exits import Exit
from kvd.host.home import locate
from protocol.errors import KvdError, ModelError, UnknownModel
from protocol.model_source import is_source, unknown_model
from protocol.types import DaemonStatus, ModelStatus

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Group(click.RichGroup):
    """Lists commands in the order of their definition, and prints errors as stderr allows."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)

    def _error_formatter(self) -> click.RichHelpFormatter:
        # rich-click renders errors for stdout, and prints them to stderr.
        with contextlib.redirect_stdout(sys.stderr or sys.stdout):
            return super()._error_formatter()

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Ctrl-C exits with `Exit.INTERRUPTED`; click would exit with 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(Exit.INTERRUPTED) from None


def option(
    flag: str, metavar: str, text: str, *, name: str | None = None, **attributes: Any
) -> Decorator:
    """Return an option that takes a value; ``text`` is its help, ``name`` its parameter's name."""
    return click.option(*filter(None, (flag, name)), metavar=metavar, help=text, **attributes)


def model_name(text: str = "The model's name.", *, required: bool = True) -> Decorator:
    """Return the argument ``model`` for a model that the daemon knows."""
    return click.argument(
        "model", required=required, help=text, shell_complete=completion.model_names
    )


def model_source(text: str) -> Decorator:
    """Return the argument ``model`` for a model that the daemon may not know yet."""
    return click.argument(
        "model",
        metavar="NAME|PATH|HUB_ID",
        help=text,
        shell_complete=completion.model_sources,
    )


def last_lines(minimum: int) -> Decorator:
    return click.option(
        "--lines", "-n", metavar="N", type=Count(minimum), default=50, help="Show the last N lines."
    )


_OPTIONS: dict[str, Decorator] = {
    "home": option(
        "--home",
        "PATH",
        "The daemon's home (default: KVD_HOME, else ~/.kvd).",
        shell_complete=completion.paths,
    ),
    "socket": option(
        "--socket",
        "PATH",
        "The daemon's socket (default: in its home).",
        shell_complete=completion.paths,
    ),
    "json": click.option("--json", is_flag=True, help="Print the data as JSON."),
}


@dataclass(frozen=True)
class CommonOptions:
    """Where the daemon is, and whether the output is JSON."""

    home: str | None = None
    socket: str | None = None
    json: bool = False

    def merged(self, group: CommonOptions) -> CommonOptions:
        """Return these options, with those given before the command's name as defaults."""
        return CommonOptions(
            self.home or group.home, self.socket or group.socket, self.json or group.json
        )

    @property
    def lock(self) -> Path:
        """The lock file that the daemon holds while it runs."""
        if self.socket is not None:
            return Path(self.socket).with_suffix(".lock")
        return locate(self.home).lock

    @contextlib.contextmanager
    def connected(self) -> Iterator[Client]:
        """Connect to the daemon; an error in the block becomes a message and an exit code."""
        with self.guarded(), Client(socket=self.socket, home=self.home) as client:
            yield client

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn an error in the block into a message and an exit code."""
        try:
            try:
                yield
            except KvdError as error:
                self.report(error)
                raise SystemExit(exits.of(error)) from None
        except KeyboardInterrupt:
            raise SystemExit(Exit.INTERRUPTED) from None
        except BrokenPipeError:
            discard_output()
            raise SystemExit(Exit.PIPE) from None

    def report(self, error: KvdError) -> None:
        """Print an error on stderr, and with ``--json`` on stdout too."""
        if self.json:
            self.print_json({"error": error.info()})
        print_message("[bold red]error:[/] {}", error.message)
        for hint in hints(error):
            print_message("[dim]hint:[/] {}", hint)

    def print_outcome(self, value: Any, form: str, *values: object) -> None:
        """Print what a command has done: a message, or ``value`` with ``--json``."""
        if self.json:
            self.print_json(value)
        else:
            print_message(form, *values)

    def print_data(self, value: Any, page: RenderableType, *, soft_wrap: bool = False) -> None:
        """Print ``page`` on stdout, or ``value`` with ``--json``."""
        if self.json:
            self.print_json(value)
        else:
            stdout_console().print(page, soft_wrap=soft_wrap)

    def print_json(self, value: Any) -> None:
        write(msgspec.json.encode(value).decode() + "\n")


def common_options(*names: str) -> Decorator:
    """Give a command ``--home``, ``--socket`` and ``--json``, or only those named.

    The command gets them as one argument, ``common``. Options given after the command's name win
    over those given before it.
    """
    names = names or tuple(_OPTIONS)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(*args: Any, **arguments: Any) -> Any:
            given = CommonOptions(**{name: arguments.pop(name) for name in names})
            context = click.get_current_context()
            assert context is not None
            group = context.find_object(CommonOptions)
            common = given if group is None else given.merged(group)
            return command(*args, common=common, **arguments)

        for name in reversed(names):
            _OPTIONS[name](wrapped)
        return wrapped

    return decorate


def option_group(*decorators: Decorator) -> Decorator:
    """Combine options into one decorator; help lists them in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def standard_panels() -> list[click.RichPanel[Any, Any]]:
    """Return the default panels, for a command with named panels: help would list those first."""
    return [click.RichOptionPanel("Arguments"), click.RichOptionPanel("Options")]


def status_with(client: Client, name: str) -> DaemonStatus:
    """Return the status, after the daemon has looked for a name in the models folder.

    Raises a `ModelError` if the name is neither a model's nor a source.
    """
    status = client.status()
    if name in {*status.unloaded, *(model.name for model in status.models)} or is_source(name):
        return status
    try:
        client.explain(name, rows=0)
    except ModelError:
        status = client.status()
        if name not in status.unloaded:  # otherwise only its memory cannot be estimated
            raise
        return status
    return client.status()


def find_model(status: DaemonStatus, name: str) -> ModelStatus:
    """Return a model's status; raises `UnknownModel` with advice."""
    found = {model.name: model for model in status.models}
    if name in status.unloaded:
        raise UnknownModel(f"{name} is not loaded; the next request for it loads it", model=name)
    if name not in found:
        raise unknown_model(name, found, status.unloaded)
    return found[name]
