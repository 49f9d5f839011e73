"""Prints a completion as its events arrive; Ctrl-C cancels only that completion."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType

from rich.text import Text

from kvd.cli.common import CommonOptions
from kvd.cli.console import print_message, stderr_console, stdout_console, write
from kvd.cli.word_wrap import WordWrap
from kvd.client import Client, Completion
from protocol.errors import KvdError
from protocol.messages import Event, Paused, Queued, Tokens
from protocol.parts import PartReader, Piece
from protocol.types import ModelState

ANSWER_S = 2.0
"""Seconds in which a daemon that is not busy answers."""
COMING: frozenset[ModelState] = frozenset({"spawning", "loading", "backoff"})
"""States of a model that will serve its requests later."""


class Stream:
    """The events of a completion.

    The first Ctrl-C cancels the completion, the second one interrupts the program.
    """

    def __init__(
        self, completion: Completion, common: CommonOptions, wrap: WordWrap | None = None
    ) -> None:
        self._completion = completion
        self._common = common
        self._wrap = wrap
        completion.on_silence = self._report_silence
        self._reader = PartReader()
        self._aside = Aside()
        self._last = ""
        """The last character written."""

    def __iter__(self) -> Iterator[Event]:
        before = signal.signal(signal.SIGINT, self._cancel)
        try:
            yield from self._completion
        finally:
            signal.signal(signal.SIGINT, before)

    def _cancel(self, _number: int, _frame: FrameType | None) -> None:
        # An exception here could lose bytes that are read but not yet parsed.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._completion.cancel()

    def _report_silence(self) -> None:
        """Print what a completion may wait for that has had no event for ten seconds."""
        about = {"socket": self._common.socket, "home": self._common.home}
        try:
            with Client(**about, timeout_s=ANSWER_S) as client:
                models = client.status().models
        except KvdError:
            print_message(
                "[dim]no message from the daemon for 10 s; `kvctl status` shows whether it is busy "
                "or stopped; Ctrl-C twice leaves[/]"
            )
            return
        coming = [model.name for model in models if model.requests and model.state in COMING]
        for name in coming:
            print_message("[dim]{} is loading; the answer begins when it is ready[/]", name)
        if not coming:
            print_message("[dim]no token for 10 s, but the daemon answers: see `kvctl status`[/]")

    def show(self, event: Event) -> None:
        """Write an event's text at once; before the first text, print why the request waits.

        Reasoning and calls go to stderr.
        """
        if isinstance(event, Tokens) and (event.text or event.parts):
            for piece in self._reader.split(event.text, event.parts):
                if piece.part.kind == "text":
                    self._aside.end()
                    write(self._wrap.add(piece.text) if self._wrap else piece.text)
                    self._last = piece.text[-1]
                else:
                    self._aside.show(piece)
        elif not self._last:
            _report_wait(event)

    def end_aside(self) -> None:
        """End a line of reasoning or of a call."""
        self._aside.end()

    def end_line(self) -> None:
        """End the last line on a terminal; a pipe gets only the completion."""
        self._aside.end()
        if sys.stdout.isatty() and self._last not in {"", "\n"}:
            write("\n")


class Aside:
    """Reasoning and calls of an answer, dimmed on stderr."""

    def __init__(self) -> None:
        self._open = False
        """Whether a line has begun."""

    def show(self, piece: Piece) -> None:
        if piece.begins:
            self.end()
        if piece.begins and piece.part.kind == "call":
            self._write(f"call {piece.part.name} ")
        self._write(piece.text)

    def end(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._open = False

    def _write(self, text: str) -> None:
        if text:
            self._open = True
            stderr_console().print(
                Text(text), style="dim", end="", soft_wrap=True, highlight=False, markup=False
            )


class WholeChoices(Stream):
    """Several choices: each is written when it and all choices before it have finished."""

    def __init__(self, completion: Completion, common: CommonOptions) -> None:
        super().__init__(completion, common)
        self._written = 0

    def show(self, event: Event) -> None:  # noqa: ARG002 - the completion has recorded it
        """Write the choices that have finished, in order."""
        choices = self._completion.choices
        while self._written < len(choices) and choices[self._written].reason is not None:
            self._write(self._written)

    def end_line(self) -> None:
        """Write the text of choices that an error has interrupted."""
        for number in range(self._written, len(self._completion.choices)):
            if self._completion.choices[number].tokens:
                self._write(number)

    def _write(self, number: int) -> None:
        choice = self._completion.choices[number]
        plural = "" if len(choice.tokens) == 1 else "s"
        reason = choice.reason or "incomplete"
        title = f"choice {number}  {reason}, {len(choice.tokens)} token{plural}"
        stdout_console().print(("\n" if self._written else "") + title, style="bold")
        for piece in choice.pieces():
            if piece.part.kind == "text":
                self._aside.end()
                write(piece.text)
            else:
                self._aside.show(piece)
        self._aside.end()
        write("\n")
        self._written = number + 1


def _report_wait(event: Event) -> None:
    if not stderr_console().is_terminal:
        return
    match event:
        case Queued(position=position):
            print_message(f"[dim]queued for memory or a row, position {position}[/]")
        case Paused(reason="restart"):
            print_message("[dim]paused: the model's worker restarts[/]")
        case Paused():
            print_message("[dim]paused: other requests need the memory[/]")
