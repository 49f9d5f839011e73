"""Consoles and messages: data goes to stdout, everything written for a person to stderr."""

from __future__ import annotations

import errno
import os
import sys

from rich.console import Console
from rich.text import Span, Text

from protocol.errors import InvalidRequest

PIPE_WIDTH = 200
"""Columns for tables in a pipe or a file, where no terminal limits them."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error for the command to handle; rich would exit with its own code."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def stdout_console() -> Console:
    """Return a console for data, as wide as the terminal, or `PIPE_WIDTH` without one."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(width=width, highlight=False, emoji=False)


def stderr_console() -> Console:
    return _Console(stderr=True, highlight=False, emoji=False)


def discard_output() -> None:
    """Point stdout and stderr at /dev/null, or Python reports a broken pipe once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def read_stdin() -> str:
    """Return stdin without its last newline; raises `InvalidRequest` if it is not UTF-8.

    `echo` and editors add that newline, and it would change the completion.
    """
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not UTF-8: {error.reason}", field="prompt") from error


def write(text: str) -> None:
    """Write data to stdout at once, unchanged."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_message(form: str, *values: object) -> None:
    """Print a line on stderr; for the arguments see `format_message`."""
    stderr_console().print(format_message(form, *values), soft_wrap=True)


def format_message(form: str, *values: object) -> Text:
    """Return rich markup as text, with each ``{}`` replaced by the next value.

    Values are inserted after the markup is parsed. Escaping them instead would not be exact: the
    meaning of a backslash before a bracket depends on everything that follows.
    """
    text = Text.from_markup(form, emoji=False)
    plain, spans, begin = text.plain, text.spans, 0
    for value in values:
        at, inserted = plain.index("{}", begin), str(value)
        plain = plain[:at] + inserted + plain[at + 2 :]

        def shifted(position: int, at: int = at, by: int = len(inserted) - 2) -> int:
            return position if position <= at else position + by

        # A style covers the whole value, which terminals then receive as one piece.
        spans = [Span(shifted(span.start), shifted(span.end), span.style) for span in spans]
        begin = at + len(inserted)
    return Text(plain, spans=spans)
