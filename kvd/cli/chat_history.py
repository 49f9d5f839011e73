"""What a person has typed in `kvctl chat`, kept in the home from one time to the next."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvd.host.home import locate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.cli.common import Terms

_MOST_LINES = 1000


@contextlib.contextmanager
def kept(terms: Terms, commands: Sequence[str], *, keep: bool = True) -> Iterator[None]:
    """Let `input` edit lines, remember them and complete /commands, while the block runs.

    A daemon that is named by its socket has no home; then nothing is kept.
    """
    try:
        import readline  # noqa: PLC0415 - only on a terminal, and not in every Python
    except ImportError:
        yield
        return
    file = None if terms.socket is not None or not keep else locate(terms.home).chat_history
    readline.set_history_length(_MOST_LINES)
    if file is not None:
        with contextlib.suppress(OSError):  # none so far
            readline.read_history_file(file)

    def complete(text: str, state: int) -> str | None:
        line = readline.get_line_buffer()
        found = [f"/{name} " for name in commands if line.startswith("/") and " " not in line]
        fitting = [one for one in found if one.startswith(text)]
        return fitting[state] if state < len(fitting) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    try:
        yield
    finally:
        if file is not None and file.parent.is_dir():
            with contextlib.suppress(OSError):
                file.touch(mode=0o600)
                readline.write_history_file(file)
