"""A completion on its way to stdout, and the Ctrl-C that ends it and nothing else."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType

from kvd.cli.common import stderr_console, stdout_console, talk
from kvd.cli.word_wrap import Wrap
from kvd.client import Completion
from protocol.messages import Event, Paused, Queued, Tokens


class Stream:
    """Iterates over a completion's events; Ctrl-C cancels it, a second one interrupts us."""

    def __init__(self, completion: Completion, wrap: Wrap | None = None) -> None:
        self._completion = completion
        self._wrap = wrap
        completion.on_silence = _say_silence
        self._last = ""

    def __iter__(self) -> Iterator[Event]:
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield from self._completion
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        # No exception: it could strike between reading bytes and sorting them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._completion.cancel()

    def show(self, event: Event) -> None:
        """Write an event's text, at once; before there is any, say why none comes."""
        if isinstance(event, Tokens) and event.text:
            sys.stdout.write(self._wrap.add(event.text) if self._wrap else event.text)
            sys.stdout.flush()
            self._last = event.text[-1]
        elif not self._last:
            _say_why(event)

    def end_line(self) -> None:
        """End the last line on a terminal; a pipe gets the completion and no more."""
        if sys.stdout.isatty() and self._last not in {"", "\n"}:
            sys.stdout.write("\n")
            sys.stdout.flush()


class Several(Stream):
    """Several completions: each is written when it and those before it are over."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion)
        self._written = 0

    def show(self, event: Event) -> None:  # noqa: ARG002 - the completion has taken it
        """Write the completions that are over, in order."""
        choices = self._completion.choices
        while self._written < len(choices) and choices[self._written].reason is not None:
            self._write(self._written)

    def end_line(self) -> None:
        """Write what there is of the others: an error ended them."""
        for number in range(self._written, len(self._completion.choices)):
            if self._completion.choices[number].tokens:
                self._write(number)

    def _write(self, number: int) -> None:
        choice = self._completion.choices[number]
        plural = "" if len(choice.tokens) == 1 else "s"
        console = stdout_console()
        title = (
            f"choice {number}  {choice.reason or 'broken off'}, {len(choice.tokens)} token{plural}"
        )
        console.print(("\n" if self._written else "") + title, style="bold")
        sys.stdout.write(choice.text + "\n")
        sys.stdout.flush()
        self._written = number + 1


def _say_why(event: Event) -> None:
    """Tell a person what a request waits for."""
    if not stderr_console().is_terminal:
        return
    match event:
        case Queued(position=position):
            talk(f"[dim]waits for memory or a place, number {position} in line[/]")
        case Paused(reason="restart"):
            talk("[dim]the model's process is started again; the request goes on then[/]")
        case Paused():
            talk("[dim]rests while others need the memory[/]")
        case _:
            pass


def _say_silence() -> None:
    talk(
        "[dim]no word from the daemon for 10 s; `kvctl status` says whether it is busy or "
        "stopped; Ctrl-C twice leaves[/]"
    )
