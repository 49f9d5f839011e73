"""Logging to stderr and to a rotating file in the home, including messages of libraries."""

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
"""Size at which the log rotates. The daemon rotates it because launchd does not."""
FILES_KEPT = 5


def setup(folder: Path | None, level: str = "info", *, to_stderr: bool = True) -> None:
    """Log to stderr, and to `kvd.log` in this folder unless it is None."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handlers: list[logging.Handler] = []
    if to_stderr:
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(_formatter(shared, _console() if sys.stderr.isatty() else _json()))
        handlers.append(console)
    if folder is not None:
        path = folder / "kvd.log"
        try:
            file = logging.handlers.RotatingFileHandler(
                path, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8"
            )
        except OSError as error:
            raise unusable(path, error) from error
        file.setFormatter(_formatter(shared, _json()))
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


def truncate_if_large(fd: int, limit: int = FILE_BYTES) -> None:
    """Empty a large regular file, such as the stderr that launchd never rotates."""
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_size > limit:
            os.ftruncate(fd, 0)
            # Without O_APPEND, the next line would follow a hole of the old size.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def _console() -> list[Any]:
    colours = "NO_COLOR" not in os.environ
    # The default formatter shows the values of variables, such as prompts and API keys.
    plain = structlog.dev.plain_traceback
    return [_brief, structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=plain)]


def _brief(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Shorten the timestamp, and drop fields without a value."""
    event["timestamp"] = datetime.now().astimezone().strftime("%H:%M:%S")
    return {key: value for key, value in event.items() if value is not None}


def _json() -> list[Any]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _formatter(shared: list[Any], last: list[Any]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
