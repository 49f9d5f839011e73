"""`kvctl logs`: the daemon's log, read from the files in its home; needs no running daemon."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click
from rich.text import Text

from kvd.cli.common import CommonOptions, common_options, last_lines, model_name, option
from kvd.cli.console import print_message, stdout_console, write
from kvd.host.home import locate
from kvd.host.units import format_bytes
from protocol.errors import ConfigError

_RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4}
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red"}
_KEPT = ("timestamp", "level", "event", "logger", "exception")
"""Fields that `line` does not print as ``key=value``."""
_POLL_S = 0.25


@click.command()
@model_name("Only lines about this model.", required=False)
@click.option("--follow", "-f", is_flag=True, help="Continue with new lines.")
@last_lines(minimum=0)
@option(
    "--level",
    "LEVEL",
    "Lowest level: debug, info, warning or error.",
    type=click.Choice(list(_STYLES)),
    default="debug",
)
@common_options("home", "json")
def logs(common: CommonOptions, model: str | None, *, follow: bool, lines: int, level: str) -> None:
    """Show the daemon's log."""
    path = locate(common.home).logs / "kvd.log"
    with common.guarded():
        if not path.exists() and not follow:
            raise ConfigError(f"there is no log at {path}: no daemon has run there", key="home")
        matches = _filter(model, level)
        for text in last(path, lines, matches):
            print_line(text, raw=common.json)
        if follow:
            if not path.exists():
                print_message("[dim]waiting for {}[/]", path)
            for text in following(path):
                if matches(text):
                    print_line(text, raw=common.json)


def print_line(text: str, *, raw: bool) -> None:
    """Print a line of the log, unchanged if ``raw``."""
    if raw:
        write(text)
    else:
        stdout_console().print(line(text), soft_wrap=True)


def _filter(model: str | None, level: str) -> Callable[[str], bool]:
    lowest = _RANKS[level]

    def matches(text: str) -> bool:
        entry = parse_entry(text)
        rank = _RANKS.get(str(entry.get("level")), _RANKS["info"])
        return rank >= lowest and (model is None or entry.get("model") == model)

    return matches


def parse_entry(text: str) -> dict[str, Any]:
    """Return the fields of a line; a line that is not JSON becomes an ``event``."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"event": text.rstrip()}


def last(path: Path, count: int, matches: Callable[[str], bool]) -> list[str]:
    """Return the last ``count`` matching lines, also from rotated files if needed."""
    found: deque[str] = deque()
    for generation in _generations(path):
        if len(found) >= count:
            break
        with generation.open(encoding="utf-8", errors="replace") as file:
            matching = (text for text in file if matches(text))
            newest = deque(matching, maxlen=count - len(found) or None)
        found.extendleft(reversed(newest))
    return list(found)[-count:] if count else []


def _generations(path: Path) -> Iterator[Path]:
    """Yield the existing files of a rotated log, the newest first."""
    number, generation = 0, path
    while generation.exists():
        yield generation
        number += 1
        generation = path.with_name(f"{path.name}.{number}")


def following(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield new lines as they are written, also after the file is rotated."""
    file = _open(path, at_end=True)
    rest = ""
    try:
        while True:
            text = file.readline() if file is not None else ""
            rest += text
            if rest.endswith("\n"):
                yield rest
                rest = ""
            elif not text:
                if file is not None and not _is_rotated(path, file):
                    sleep(_POLL_S)
                    continue
                if file is not None:
                    file.close()
                file = _open(path, at_end=False)
                if file is None:
                    sleep(_POLL_S)
    finally:
        if file is not None:
            file.close()


def _open(path: Path, *, at_end: bool) -> TextIOWrapper | None:
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if at_end:
        file.seek(0, os.SEEK_END)
    return file


def _is_rotated(path: Path, file: TextIOWrapper) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False  # between the two renames of a rotation


def line(text: str) -> Text:
    """Return a line of the log for the terminal, with the traceback below it."""
    entry = parse_entry(text)
    level = str(entry.get("level", "info"))
    shown = Text.assemble(
        (_clock(entry.get("timestamp")), "dim"),
        " ",
        (f"{level:<7}", _STYLES.get(level, "bold red")),
        " ",
        (str(entry.get("event", "")), "bold"),
    )
    for key, value in entry.items():
        if key not in _KEPT and value is not None:
            _append(shown, key, value)
    if trace := entry.get("exception"):
        shown.append("\n" + str(trace).rstrip(), "red")
    return shown


def _append(shown: Text, key: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _append(shown, name, inner)
    elif key.endswith("_bytes") and isinstance(value, int):
        shown.append(f"  {key.removesuffix('_bytes')}=", "dim").append(format_bytes(value))
    else:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        shown.append(f"  {key}=", "dim").append(text)


def _clock(timestamp: object) -> str:
    """Return the local time, with the date unless that is today."""
    try:
        at = datetime.fromisoformat(str(timestamp)).astimezone()
    except ValueError:
        return "--:--:--"
    today = datetime.now().astimezone().date()
    return at.strftime("%H:%M:%S" if at.date() == today else "%m-%d %H:%M:%S")
