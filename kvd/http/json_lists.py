"""An object of lists, encoded as JSON piece by piece.

Python objects would take several times the memory, and block the event loop for a second when
they are encoded at the end.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import asdict

_json = msgspec.json.Encoder()


class JsonLists:
    """The JSON of an object whose list fields grow.

    All pieces have the struct type of ``template``, which supplies the fields that are not lists.
    """

    def __init__(self, template: msgspec.Struct) -> None:
        self._fields: dict[str, object] = asdict(template)
        self.lists = {
            name: bytearray() for name, value in self._fields.items() if isinstance(value, list)
        }

    def add(self, piece: msgspec.Struct) -> int:
        """Append the list items of a piece; return the bytes added."""
        added = 0
        for name, items in self.lists.items():
            before = len(items)
            _append(items, _json.encode(getattr(piece, name))[1:-1])
            added += len(items) - before
        return added

    def encoded(self, before: JsonLists | None = None) -> msgspec.Raw:
        """Return the object as JSON, with the items of ``before`` ahead of its own."""
        fields = dict(self._fields)
        for name, items in self.lists.items():
            joined = bytearray() if before is None else bytearray(before.lists[name])
            _append(joined, items)
            fields[name] = msgspec.Raw(b"[" + joined + b"]")
        return msgspec.Raw(_json.encode(fields))


def _append(items: bytearray, more: bytes | bytearray) -> None:
    if items and more:
        items += b","
    items += more
