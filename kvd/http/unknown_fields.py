"""Unknown fields of request bodies, for APIs that ignore them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import fields

from protocol.errors import bounded

T = TypeVar("T", bound=msgspec.Struct)

_MOST_NAMES = 16
"""Names in the log of one request."""
_log = structlog.get_logger("kvd.http")


def count_unknown(body: bytes | bytearray, kind: type[T], path: str) -> int:
    """Return how many fields of a decoded body the struct does not have, and log their names."""
    known = {field.encode_name for field in fields(kind)}
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = [name for name in given if name not in known]
    if unknown:
        _log.debug("ignored unknown fields", path=path, fields=bounded(unknown[:_MOST_NAMES]))
    return len(unknown)
