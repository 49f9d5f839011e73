"""Line editing for `kvctl chat`; the typed lines are stored in the home."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kvd.cli.common import CommonOptions
from kvd.host.home import locate

_MAX_LINES = 1000


@contextlib.contextmanager
def line_editing(
    common: CommonOptions, commands: Sequence[str], *, store: bool = True
) -> Iterator[None]:
    """Inside the block, `input` edits lines, recalls earlier ones and completes /commands.

    With ``--socket`` the home is unknown, so nothing is stored.
    """
    try:
        import readline  # noqa: PLC0415 - only on a terminal, and not in every Python
    except ImportError:
        yield
        return
    file = locate(common.home).chat_history if store and common.socket is None else None
    readline.set_history_length(_MAX_LINES)
    if file is not None:
        with contextlib.suppress(OSError):  # the first chat has no file
            readline.read_history_file(file)

    def complete(text: str, state: int) -> str | None:
        line = readline.get_line_buffer()
        names = [f"/{name} " for name in commands if line.startswith("/") and " " not in line]
        matches = [name for name in names if name.startswith(text)]
        return matches[state] if state < len(matches) else None

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
