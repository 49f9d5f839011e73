"""Decodes the query of a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
_BOOLEANS = {"true": True, "false": False}


def read_query(query: Mapping[str, str], kind: type[T]) -> T:
    """Decode a query; unknown names are ignored. Raises `InvalidRequest`."""
    values = {name: _BOOLEANS.get(query[name], query[name]) for name in query}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`") or None
        raise InvalidRequest(f"{field or 'the query'}: {text}", field=field) from None
