"""Responses for ``previous_response_id`` and ``GET /v1/responses/{id}``, bounded in bytes and age.

Only the API key that made a response may use it. Responses that run are kept until they end; if
they exceed the bytes, their oldest events are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from kvd.http.responses_api.background import Run

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
class Stored:
    """A stored response."""

    owner: str | None
    previous: str | None
    input: tuple[Raw, ...]
    body: bytes
    used_at: float
    run: Run | None = None
    """The events of a background response."""
    size: int = field(init=False)
    """Bytes that count for it."""

    def __post_init__(self) -> None:
        self._fixed = sum(memoryview(item).nbytes for item in self.input) + _OVERHEAD_BYTES
        self.size = self.measure()

    @property
    def runs(self) -> bool:
        return self.run is not None and not self.run.over

    def measure(self) -> int:
        """Return the bytes that count now; called after each event of a background response."""
        events = 0 if self.run is None else self.run.nbytes
        return self._fixed + len(self.body) + events


class Store:
    """The stored responses, the least recently used one first. ``clock`` is monotonic."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._stored: dict[str, Stored] = {}
        self.bytes = 0

    def put(
        self,
        response_id: str,
        owner: str | None,
        previous: str | None,
        own_input: tuple[Raw, ...],
        body: bytes,
        run: Run | None = None,
    ) -> bool:
        """Store a response; drop others that are old, or the least recently used ones.

        Return False, and do nothing, if it is too large.
        """
        now = self._clock()
        stored = Stored(owner, previous, own_input, body, now, run)
        if stored.size > self._max_bytes:
            return False
        for found in list(self._chain(previous, owner)):
            self._use(found)
        self._stored[response_id] = stored
        self.bytes += stored.size
        self._evict(now)
        return True

    def update(self, response_id: str) -> None:
        """Take what the run of a response has changed; without effect if it is not stored."""
        stored = self._stored.get(response_id)
        if stored is None or stored.run is None:
            return
        stored.body = stored.run.body
        if stored.run.over:
            self._use(response_id)
        self._resize(stored)
        self._evict(self._clock())
        if (excess := self.bytes - self._max_bytes) > 0 and response_id in self._stored:
            stored.run.drop_events(excess)
            self._resize(stored)

    def body(self, response_id: str, owner: str | None) -> bytes | None:
        """Return a response as JSON."""
        found = self.find(response_id, owner)
        return None if found is None else found.body

    def delete(self, response_id: str, owner: str | None) -> bool:
        """Forget a response, and cancel it if it runs; return whether it was stored."""
        found = self.find(response_id, owner)
        if found is None:
            return False
        self._drop(response_id)
        if found.run is not None:
            found.run.cancel()
        return True

    def history(self, response_id: str, owner: str | None) -> list[list[Raw]]:
        """Return the items of a response and those before it, oldest first.

        Raises `InvalidRequest` if one of them is not stored.
        """
        history: list[list[Raw]] = []
        chain = list(self._chain(response_id, owner))
        for found in chain:
            stored = self._stored[found]
            if stored.runs:
                raise InvalidRequest(
                    f"previous_response_id: the response {found!r} is not over; wait for its end, "
                    "or cancel it",
                    field="previous_response_id",
                )
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
        found = self.find(f"resp_{own}", owner)
        if found is None or len(index) > _INDEX_DIGITS or not index.isdecimal():
            return None
        output = msgspec.json.decode(found.body, type=_Output).output
        return output[int(index)] if int(index) < len(output) else None

    def _chain(self, response_id: str | None, owner: str | None) -> Iterator[str]:
        """Yield the ids of a stored response and its predecessors, as far as they are stored."""
        while response_id is not None and (found := self.find(response_id, owner)) is not None:
            yield response_id
            response_id = found.previous

    def find(self, response_id: str, owner: str | None) -> Stored | None:
        """Return a response of this owner, if it is stored."""
        self._evict(self._clock())
        found = self._stored.get(response_id)
        return found if found is not None and found.owner == owner else None

    def _use(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        stored.used_at = self._clock()
        self._stored[response_id] = stored

    def _evict(self, now: float) -> None:
        excess = self.bytes - self._max_bytes
        dropped: list[str] = []
        for response_id, stored in self._stored.items():
            if excess <= 0 and now - stored.used_at <= MAX_AGE_S:
                break
            if not stored.runs:
                dropped.append(response_id)
                excess -= stored.size
        for response_id in dropped:
            self._drop(response_id)

    def _resize(self, stored: Stored) -> None:
        self.bytes -= stored.size
        stored.size = stored.measure()
        self.bytes += stored.size

    def _drop(self, response_id: str) -> None:
        self.bytes -= self._stored.pop(response_id).size
