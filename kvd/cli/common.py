"""What all commands share: the options of the place, the way to talk and the way to fail."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Span, Text

from kvd.cli import completion
from kvd.client import Client
from kvd.host import exits
from kvd.host.exits import Exit
from kvd.host.home import locate
from protocol.errors import (
    InvalidRequest,
    KvdError,
    UnknownModel,
    UnknownOp,
    UnsupportedVersion,
)
from protocol.types import DaemonStatus, ModelStatus

HomeOption = Annotated[
    str | None,
    typer.Option(
        "--home", metavar="PATH", help="The daemon's home (default: KVD_HOME, else ~/.kvd)."
    ),
]
SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="The daemon's socket (default: in its home)."),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print the data as JSON.")]

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="The model's name.", autocompletion=completion.a_model),
]

WIDE_PIPE = 200
"""Columns for tables that go into a pipe or a file, where nothing should be cut."""


@dataclass(frozen=True)
class Terms:
    """Where the daemon is and how the answer is wanted."""

    home: str | None = None
    socket: str | None = None
    json: bool = False

    def over(self, other: Terms) -> Terms:
        """Return these terms, with the other ones where these say nothing."""
        return Terms(self.home or other.home, self.socket or other.socket, self.json or other.json)

    @property
    def lock(self) -> Path:
        """The lock file that the daemon holds while it lives."""
        if self.socket is not None:
            return Path(self.socket).with_suffix(".lock")
        return locate(self.home).lock

    @contextlib.contextmanager
    def connected(self) -> Iterator[Client]:
        """Give a client; what goes wrong becomes a message and an exit code."""
        with self.guarded(), Client(socket=self.socket, home=self.home) as client:
            yield client

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn what goes wrong inside into a message and an exit code."""
        try:
            try:
                yield
            except KvdError as error:
                self.complain(error)
                raise typer.Exit(exits.of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None
        except BrokenPipeError:
            _stop_writing()
            raise typer.Exit(Exit.PIPE) from None

    def complain(self, error: KvdError) -> None:
        """Say what went wrong: to people on stderr, and to programs on stdout."""
        if self.json:
            self.print_json({"error": error.info()})
        talk("[bold red]error:[/] {}", error.message)
        for key, value in sorted(error.detail.items()):
            if key in _HINTS:
                talk("[dim]hint:[/] {}", _HINTS[key].format(value))
        if isinstance(error, UnknownOp | UnsupportedVersion):
            talk("[dim]hint:[/] the daemon is of another version than kvctl; restart it")

    def print_json(self, value: Any) -> None:
        """Print a value as one line of JSON."""
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
        sys.stdout.flush()


_HINTS = {"retry_after_s": "try again in {} s"}


def terms(
    context: typer.Context, home: str | None, socket: str | None, *, json: bool = False
) -> Terms:
    """Return what was said after the command, over what was said before it."""
    before = context.obj if isinstance(context.obj, Terms) else Terms()
    return Terms(home, socket, json).over(before)


def model_in(status: DaemonStatus, name: str) -> ModelStatus:
    """Return a model's status; raises `UnknownModel` with what to do."""
    found = {model.name: model for model in status.models}
    if name in status.unloaded:
        raise UnknownModel(f"{name} is not loaded; a request for it brings it", model=name)
    if name not in found:
        there = f"loaded: {', '.join(found)}" if found else "no model is loaded"
        raise UnknownModel(
            f"no model {name!r} ({there}); load it with `kvctl load {name}`", model=name
        )
    return found[name]


def forced_json(value: Terms) -> Terms:
    """Return the same terms with JSON wanted."""
    return replace(value, json=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let `Terms.guarded` end us; rich would exit with a code of its own."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _stop_writing() -> None:
    """Whoever read our output has enough; Python must not flush into it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def stdout_console() -> Console:
    """Return a console for data; as wide as the terminal, and wide where there is none."""
    fixed = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE_PIPE
    return _Console(width=fixed, highlight=False, emoji=False)


def stderr_console() -> Console:
    """Return a console for talk."""
    return _Console(stderr=True, highlight=False, emoji=False)


def stdin() -> str:
    """Return all of stdin; raises `InvalidRequest` for what is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not UTF-8: {error.reason}", field="prompt") from error


def talk(form: str, *values: object) -> None:
    """Say a line on stderr (`said`)."""
    stderr_console().print(said(form, *values), soft_wrap=True)


def said(form: str, *values: object) -> Text:
    """Return rich markup as text, with the values where it says ``{}``.

    What is not ours comes as a value: no escape keeps every text as it is, since what a backslash
    before a bracket means depends on all that follows.
    """
    text = Text.from_markup(form, emoji=False)
    plain, spans, begin = text.plain, text.spans, 0
    for value in values:
        at, shown = plain.index("{}", begin), str(value)
        plain = plain[:at] + shown + plain[at + 2 :]

        def moved(place: int, at: int = at, more: int = len(shown) - 2) -> int:
            return place if place <= at else place + more

        # A style goes on through the value: a terminal reads one piece.
        spans = [Span(moved(one.start), moved(one.end), one.style) for one in spans]
        begin = at + len(shown)
    return Text(plain, spans=spans)
