"""Single keys from a terminal.

One `select` waits for keys, for a changed window size, for Ctrl-Z, and for another thread's
`Keyboard.wake`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType
from typing import Self

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
    """Reads a terminal key by key; as a context manager it restores the terminal."""

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
        """Read keys at once and without echo."""
        self._before = termios.tcgetattr(self._stdin)
        tty.setcbreak(self._stdin)

    def end(self) -> None:
        termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wake(self) -> None:
        """Make `wait` return; any thread may call it."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for any event; return the keys, and ``stop`` for Ctrl-Z."""
        ready, _, _ = select.select([self._stdin, self._reader], [], [], timeout_s)
        keys: list[str] = []
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTSTP in os.read(self._reader, 4096):
                    keys.append("stop")
        if self._stdin in ready:
            data = os.read(self._stdin, 4096)
            # No data means that the terminal is closed, so quit.
            keys += parse_keys(data.decode(errors="replace")) if data else ["q"]
        return keys


def parse_keys(text: str) -> list[str]:
    """Return the keys in a terminal's input; escape sequences become names."""
    keys = []
    while text:
        longest_first = sorted(_SEQUENCES, key=len, reverse=True)
        found = next((key for key in longest_first if text.startswith(key)), text[0])
        text = text[len(found) :]
        keys.append(_SEQUENCES.get(found, found))
    return keys


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wakeup pipe delivers the signal's number."""
