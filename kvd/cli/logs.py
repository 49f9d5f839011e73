"""`kvctl logs`: the daemon's log from its home, for people in colour, for programs as it is.

Reads the files, so it needs no daemon and works after its death.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text

from kvd.cli.common import HomeOption, JsonOption, stdout_console, talk, terms
from kvd.cli.completion import a_model
from kvd.host.home import locate
from kvd.host.units import format_bytes
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import TextIOWrapper
    from pathlib import Path

_RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4}
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red"}
_KEPT = ("timestamp", "level", "event", "logger", "exception")
"""Fields with a place of their own."""
_NAP_S = 0.25
"""Between looks for new lines."""


def logs(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Only what concerns this one.", autocompletion=a_model
        ),
    ] = None,
    *,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", metavar="", help="Go on with what is written from now."),
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="So many of the last ones.")
    ] = 50,
    level: Annotated[
        str, typer.Option(metavar="LEVEL", help="From debug, info, warning or error on.")
    ] = "debug",
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show the daemon's log."""
    wanted = terms(context, home, None, json=json)
    if level not in _STYLES:
        raise typer.BadParameter(f"there is no level {level!r}; they are {', '.join(_STYLES)}")
    path = locate(wanted.home).logs / "kvd.log"
    console = stdout_console()

    def show(text: str) -> None:
        if wanted.json:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            console.print(line(text), soft_wrap=True)

    with wanted.guarded():
        if not path.exists() and not follow:
            raise ConfigError(f"there is no log at {path}: no daemon has run there", key="home")
        chosen = _chosen(model, level)
        for text in last(path, lines, chosen):
            show(text)
        if follow:
            if not path.exists():
                talk("[dim]waiting for {}[/]", path)
            for text in following(path):
                if chosen(text):
                    show(text)


def _chosen(model: str | None, level: str) -> Callable[[str], bool]:
    least = _RANKS[level]

    def chosen(text: str) -> bool:
        entry = entry_of(text)
        rank = _RANKS.get(str(entry.get("level")), _RANKS["info"])
        return rank >= least and (model is None or entry.get("model") == model)

    return chosen


def entry_of(text: str) -> dict[str, Any]:
    """Return what a line of the log holds; of one that is no JSON the text as its event."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"event": text.rstrip()}


def last(path: Path, count: int, chosen: Callable[[str], bool]) -> list[str]:
    """Return the last chosen lines, from as many generations of the file as it takes."""
    found: deque[str] = deque()
    for one in _generations(path):
        if len(found) >= count:
            break
        with one.open(encoding="utf-8", errors="replace") as file:
            of_it = deque(
                (text for text in file if chosen(text)), maxlen=count - len(found) or None
            )
        found.extendleft(reversed(of_it))
    return list(found)[-count:] if count else []


def _generations(path: Path) -> Iterator[Path]:
    """Yield the files of a log that are there, the newest first."""
    number, one = 0, path
    while one.exists():
        yield one
        number += 1
        one = path.with_name(f"{path.name}.{number}")


def following(path: Path, nap: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield the lines that are written from now on, through rotations of the file."""
    file = _opened(path, at_end=True)
    rest = ""
    try:
        while True:
            text = file.readline() if file is not None else ""
            rest += text
            if rest.endswith("\n"):
                yield rest
                rest = ""
            elif not text:
                if file is not None and not _is_another(path, file):
                    nap(_NAP_S)
                    continue
                if file is not None:
                    file.close()
                file = _opened(path, at_end=False)
                if file is None:
                    nap(_NAP_S)
    finally:
        if file is not None:
            file.close()


def _opened(path: Path, *, at_end: bool) -> TextIOWrapper | None:
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if at_end:
        file.seek(0, os.SEEK_END)
    return file


def _is_another(path: Path, file: TextIOWrapper) -> bool:
    """Return whether the path is another file by now."""
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False  # between the two moves of a rotation


def line(text: str) -> Text:
    """Return a line of the log as people read it; tracebacks stand below."""
    entry = entry_of(text)
    level = str(entry.get("level", "info"))
    made = Text.assemble(
        (_clock(entry.get("timestamp")), "dim"),
        " ",
        (f"{level:<7}", _STYLES.get(level, "bold red")),
        " ",
        (str(entry.get("event", "")), "bold"),
    )
    for key, value in entry.items():
        if key not in _KEPT and value is not None:
            _append(made, key, value)
    if trace := entry.get("exception"):
        made.append("\n" + str(trace).rstrip(), "red")
    return made


def _append(made: Text, key: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _append(made, name, one)
    elif key.endswith("_bytes") and isinstance(value, int):
        made.append(f"  {key.removesuffix('_bytes')}=", "dim").append(format_bytes(value))
    else:
        shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        made.append(f"  {key}=", "dim").append(shown)


def _clock(stamp: object) -> str:
    """Return the local time of a line, with the day if it was another one."""
    try:
        at = datetime.fromisoformat(str(stamp)).astimezone()
    except ValueError:
        return "--:--:--"
    today = datetime.now().astimezone().date()
    return at.strftime("%H:%M:%S" if at.date() == today else "%m-%d %H:%M:%S")
