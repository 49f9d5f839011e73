"""Logging: structlog in front, the standard library behind.

To a person (a terminal on stderr) in colour, to anything else as JSON lines; and always as JSON
lines into a rotating file of the home. What the libraries log passes through the same two.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import logging.handlers
import os
import stat
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import structlog

from kvd.host.home import unusable

if TYPE_CHECKING:
    from pathlib import Path

    from structlog.typing import EventDict

FILE_BYTES = 8 * 1024 * 1024
"""Of one generation; launchd's own files never rotate, so the daemon does it itself."""
FILES_KEPT = 5


def setup(folder: Path | None, level: str = "info", *, aloud: bool = True) -> None:
    """Send logs to stderr, and to `kvd.log` in this folder unless it is None.

    Not `aloud`: to the file alone.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handlers: list[logging.Handler] = []
    if aloud:
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(_formatter(shared, _person() if sys.stderr.isatty() else _machine()))
        handlers.append(console)
    if folder is not None:
        path = folder / "kvd.log"
        try:
            file = logging.handlers.RotatingFileHandler(
                path, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8"
            )
        except OSError as error:
            raise unusable(path, error) from error
        file.setFormatter(_formatter(shared, _machine()))
        handlers.append(file)
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def bound(fd: int, most: int = FILE_BYTES) -> None:
    """Empty the file behind a descriptor, if there is one and it has grown beyond `most`.

    For the file that launchd gives us as stderr, which nobody else keeps small.
    """
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_size > most:
            os.ftruncate(fd, 0)
            # Or the next line would stand behind a hole of the old size.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def set_level(level: str) -> None:
    """Log from this level on, from now on."""
    logging.getLogger().setLevel(level.upper())


def _person() -> list[Any]:
    colours = "NO_COLOR" not in os.environ
    # The default shows what variables hold: prompts, and who asks with which key.
    plain = structlog.dev.plain_traceback
    return [_brief, structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=plain)]


def _brief(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Leave out what a person at a terminal need not read."""
    event["timestamp"] = datetime.now().astimezone().strftime("%H:%M:%S")
    return {key: value for key, value in event.items() if value is not None}


def _machine() -> list[Any]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _formatter(shared: list[Any], last: list[Any]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
