"""Fields of request bodies that kvd does not have: most are ignored, and typos are refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import fields

from protocol.errors import InvalidRequest, bounded, shorten

if TYPE_CHECKING:
    from kvd.http.backend import Ignored

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""kvd's names for settings of other APIs, which would change the answer silently if ignored."""

MOST_NAMES = 256
"""Maximum names of ignored fields that get an event record, over the daemon's life."""
_LONGEST_NAME = 64
"""Characters above which a name is no typo; longer names are shortened in event records."""
_FIRST_LIMITS = ((9, 2), (6, 1))
"""Minimum lengths of known names, and maximum edits of their typos. Shorter names are too alike."""

Ignore = Callable[[Sequence[str]], None]
"""Called with the names of a body's unknown fields, if there are any."""


@dataclass(frozen=True)
class UnknownFields:
    """Counts ignored fields, and records each name once."""

    ignored: Ignored
    record: Callable[[str], None]
    """Adds a text to the event log."""
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def at(self, path: str) -> Ignore:
        """Return the callback for bodies of a route."""
        return partial(self._add, path)

    def _add(self, path: str, names: Sequence[str]) -> None:
        self.ignored(path, "field", len(names))
        for name in itertools.islice(names, MOST_NAMES):
            key = (path, shorten(name, _LONGEST_NAME))
            if key not in self._seen and len(self._seen) < MOST_NAMES:
                self._seen.add(key)
                self.record(f"{path}: kvd has no field {bounded(key[1])}; it is ignored")


def unknown_fields(body: bytes | bytearray, kind: Any) -> list[str]:
    """Return the names in a JSON object that a struct does not have.

    Raises `InvalidRequest` for a typo of one of its names, if the struct has `REFUSES_TYPOS`, and
    msgspec's errors for a body that is not a JSON object.
    """
    if not hasattr(kind, "__struct_fields__"):  # a union of structs, each of which has its own rule
        return []
    known = _known(kind)
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = [name for name in given if name not in known]
    if unknown and getattr(kind, "REFUSES_TYPOS", False):
        absent = known - {name for name, value in given.items() if bytes(value) != b"null"}
        for name in itertools.islice(unknown, MOST_NAMES):
            if (meant := _meant(name, absent)) is not None:
                text = f"{name} is an unknown key; did you mean {meant}?"
                raise InvalidRequest(text, field=name)
    return unknown


@functools.cache
def _known(kind: type) -> frozenset[str]:
    # msgspec evaluates the annotations of all fields: 0.6 ms for a chat request.
    return frozenset(one.encode_name for one in fields(kind))


def _meant(name: str, absent: Collection[str]) -> str | None:
    """Return the known name that this one is a typo of, among those that have no value."""
    if len(name) > _LONGEST_NAME:
        return None
    if OTHER_NAMES.get(name) in absent:
        return OTHER_NAMES[name]
    if alike := [one for one in absent if _plain(one) == _plain(name)]:
        return min(alike)
    near = [(_edits(name, one, _limit(one)), one) for one in absent if _may_be_near(name, one)]
    edits, meant = min(near, default=(_LONGEST_NAME, ""))
    return meant if edits <= _limit(meant) else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _limit(name: str) -> int:
    return next((edits for length, edits in _FIRST_LIMITS if len(name) >= length), 0)


def _may_be_near(name: str, known: str) -> bool:
    return abs(len(name) - len(known)) <= _limit(known) and _limit(known) > 0


def _edits(first: str, second: str, limit: int) -> int:
    """Return the fewest edits between two names: insert, delete, replace, swap neighbours.

    If they are more than ``limit``, the result is some number above it.
    """
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, a in enumerate(first):
        rows = (before, row)
        before, row = row, [i + 1]
        for j, b in enumerate(second):
            least = min(before[j + 1] + 1, row[j] + 1, before[j] + (a != b))
            if i and j and a == second[j - 1] and first[i - 1] == b:
                least = min(least, rows[0][j - 1] + 1)
            row.append(least)
        if min(*before, *row) > limit:  # further rows build on these two
            break
    return row[-1]
