"""Responses for ``previous_response_id`` and ``GET /v1/responses/{id}``, bounded in bytes and age.

Only the API key that made a response may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequest

MAX_BYTES = 32 * 1024 * 1024
"""Limit of all stored responses. A longer conversation has each item once."""
MAX_AGE_S = 6 * 3600.0
"""Seconds without use after which a response is dropped."""
_OVERHEAD_BYTES = 1024
_INDEX_DIGITS = 9
"""Most digits of an item's number in its id. Python refuses to read thousands of digits."""


class _Output(msgspec.Struct):
    output: list[Raw]


@dataclass
class _Stored:
    owner: str | None
    previous: str | None
    input: tuple[Raw, ...]
    body: bytes
    size: int
    used_at: float


class Store:
    """The stored responses, the least recently used one first. ``clock`` is monotonic."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._stored: dict[str, _Stored] = {}
        self.bytes = 0

    def put(
        self,
        response_id: str,
        owner: str | None,
        previous: str | None,
        own_input: tuple[Raw, ...],
        body: bytes,
    ) -> None:
        """Store a response; drop others that are old, or the least recently used ones."""
        size = len(body) + sum(memoryview(item).nbytes for item in own_input) + _OVERHEAD_BYTES
        if size > self._max_bytes:
            return
        for found in list(self._chain(previous, owner)):
            self._use(found)
        now = self._clock()
        self._stored[response_id] = _Stored(owner, previous, own_input, body, size, now)
        self.bytes += size
        self._evict(now)

    def body(self, response_id: str, owner: str | None) -> bytes | None:
        """Return a response as JSON."""
        found = self._find(response_id, owner)
        return None if found is None else found.body

    def delete(self, response_id: str, owner: str | None) -> bool:
        if self._find(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def history(self, response_id: str, owner: str | None) -> list[list[Raw]]:
        """Return the items of a response and those before it, oldest first.

        Raises `InvalidRequest` if one of them is not stored.
        """
        history: list[list[Raw]] = []
        chain = list(self._chain(response_id, owner))
        for found in chain:
            stored = self._stored[found]
            output = msgspec.json.decode(stored.body, type=_Output).output
            history.append([*stored.input, *output])
        last = self._stored[chain[-1]].previous if chain else response_id
        if last is not None:
            raise InvalidRequest(
                f"previous_response_id: the response {last!r} is not stored (any more): responses "
                f"are kept for {MAX_AGE_S / 3600:g} hours, in at most "
                f"{self._max_bytes // 2**20} MiB of memory, and end with the daemon; send the "
                "whole conversation in input",
                field="previous_response_id",
            )
        for found in chain:
            self._use(found)
        return history[::-1]

    def item(self, item_id: str, owner: str | None) -> Raw | None:
        """Return an output item by its id."""
        _, _, rest = item_id.partition("_")
        own, _, index = rest.rpartition("_")
        found = self._find(f"resp_{own}", owner)
        if found is None or len(index) > _INDEX_DIGITS or not index.isdecimal():
            return None
        output = msgspec.json.decode(found.body, type=_Output).output
        return output[int(index)] if int(index) < len(output) else None

    def _chain(self, response_id: str | None, owner: str | None) -> Iterator[str]:
        """Yield the ids of a stored response and its predecessors, as far as they are stored."""
        while response_id is not None and (found := self._find(response_id, owner)) is not None:
            yield response_id
            response_id = found.previous

    def _find(self, response_id: str, owner: str | None) -> _Stored | None:
        self._evict(self._clock())
        found = self._stored.get(response_id)
        return found if found is not None and found.owner == owner else None

    def _use(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        stored.used_at = self._clock()
        self._stored[response_id] = stored

    def _evict(self, now: float) -> None:
        while self._stored:
            oldest, stored = next(iter(self._stored.items()))
            if self.bytes <= self._max_bytes and now - stored.used_at <= MAX_AGE_S:
                return
            self._drop(oldest)

    def _drop(self, response_id: str) -> None:
        self.bytes -= self._stored.pop(response_id).size
