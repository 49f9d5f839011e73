"""Single keys from a terminal, while something else is shown on it; and what a terminal signals.

One `select` waits for keys, for a change of the window's size, for a stop by Ctrl-Z, and for word
from another thread (`Keyboard.wake`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    " ": "space",
}
_SIGNALS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)


class Keyboard:
    """A terminal whose keys come one by one; a context manager that gives it back as it was."""

    def __init__(self) -> None:
        self._stdin = sys.stdin.fileno()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._before: list[object] = []
        self._handlers: dict[int, object] = {}
        self._unread = ""

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, _ignore)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    def begin(self) -> None:
        """Have keys come at once and unseen."""
        self._before = termios.tcgetattr(self._stdin)
        tty.setcbreak(self._stdin)

    def end(self) -> None:
        """Let the terminal be as it was."""
        termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Sleep until something comes; return the keys, and ``stop`` for a Ctrl-Z."""
        ready, _, _ = select.select([self._stdin, self._reader], [], [], timeout_s)
        keys: list[str] = []
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTSTP in os.read(self._reader, 4096):
                    keys.append("stop")
        if self._stdin in ready:
            data = os.read(self._stdin, 4096)
            keys += (
                keys_of(data.decode(errors="replace")) if data else ["q"]
            )  # the terminal is gone
        return keys


def keys_of(text: str) -> list[str]:
    """Return the keys that these characters stand for, sequences by their names."""
    keys = []
    while text:
        found = next(
            (one for one in sorted(_SEQUENCES, key=len, reverse=True) if text.startswith(one)),
            text[0],
        )
        text = text[len(found) :]
        keys.append(_SEQUENCES.get(found, found))
    return keys


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Let the wakeup pipe say it."""
