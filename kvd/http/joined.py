"""JSON of an object of lists, joined list by list as its pieces come; they themselves are not kept.

As objects, what is told of an answer's tokens would be several times as much, and making JSON of
all of it at its end would stop everybody for a second.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import asdict

_json = msgspec.json.Encoder()


class Joined:
    """Pieces are structs of one type; of `empty`, whose lists are, comes what is no list."""

    def __init__(self, empty: msgspec.Struct) -> None:
        fields = asdict(empty)
        self.lists = {name: bytearray() for name, it in fields.items() if isinstance(it, list)}
        self._others = {name: it for name, it in fields.items() if name not in self.lists}

    @property
    def size(self) -> int:
        """Bytes, but for brackets."""
        return sum(map(len, self.lists.values()))

    def add(self, piece: msgspec.Struct) -> int:
        """Add what is in the lists of a piece; return how many bytes that is."""
        before = self.size
        for name, items in self.lists.items():
            _append(items, _json.encode(getattr(piece, name))[1:-1])
        return self.size - before

    def after(self, first: Joined | None) -> msgspec.Raw:
        """Return the whole, with the items of `first` before its own."""
        whole: dict[str, object] = dict(self._others)
        for name, items in self.lists.items():
            every = bytearray(b"[")
            if first is not None:
                every += first.lists[name]
            every += b"," if len(every) > 1 and items else b""
            every += items
            every += b"]"
            whole[name] = msgspec.Raw(every)
        return msgspec.Raw(_json.encode(whole))


def _append(items: bytearray, more: bytes) -> None:
    if items and more:
        items += b","
    items += more
