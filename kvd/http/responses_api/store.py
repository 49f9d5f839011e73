"""Responses for ``previous_response_id`` and ``GET /v1/responses/{id}``, bounded in bytes and age.

Only the API key that made a response may use it. Background responses are kept while they run, in
at most half of the bytes: beyond that, their oldest events are dropped, then new ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from kvd.http.responses_api.background import Run

MAX_BYTES = 32 * 1024 * 1024
"""Limit of all stored responses. A longer conversation has each item once."""
RUNNING_PARTS = 2
"""Responses that run take at most one of so many parts of the limit."""
EVENT_PARTS = 8
"""Events of one response take at most one of so many parts of the limit: 4 MiB, which is enough for
16,000 tokens."""
MAX_AGE_S = 6 * 3600.0
"""Seconds without use after which a response is dropped."""
_RETRY_AFTER_S = 10.0
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
        self.first_bytes = self.event_bytes
        """Bytes of the first events, which contain the request's tools and instructions."""
        self.size = self.measure()

    @property
    def event_bytes(self) -> int:
        return 0 if self.run is None else self.run.nbytes

    def measure(self) -> int:
        """Return the bytes that count now; called after each event of a background response."""
        return self._fixed + len(self.body) + self.event_bytes


class Store:
    """The stored responses, the least recently used one first. ``clock`` is monotonic."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._stored: dict[str, Stored] = {}
        self.bytes = 0
        self._running: dict[str, Stored] = {}
        self.running_bytes = 0
        """Bytes of the responses that run, which are a part of `bytes`."""

    def put(
        self,
        response_id: str,
        owner: str | None,
        previous: str | None,
        own_input: tuple[Raw, ...],
        body: bytes,
    ) -> bool:
        """Store a response that is over; drop those that are old or the least recently used.

        Return False, and do nothing, if it is too large.
        """
        stored = Stored(owner, previous, own_input, body, self._clock())
        if stored.size > self._max_bytes:
            return False
        self._add(response_id, stored)
        return True

    def begin(
        self,
        response_id: str,
        owner: str | None,
        previous: str | None,
        own_input: tuple[Raw, ...],
        run: Run,
    ) -> None:
        """Store a background response; `update` is called after each of its events.

        Raises `InvalidRequest` if it is too large, and `Overloaded` if those that run leave too
        little memory.
        """
        stored = Stored(owner, previous, own_input, run.body, self._clock(), run)
        limit = self._max_bytes // RUNNING_PARTS
        if stored.size > limit:
            raise InvalidRequest(
                f"the request takes {stored.size} bytes as a background response, and the limit "
                f"for all of them together is {limit}; send it with stream: true and without "
                "background",
                field="background",
            )
        kept = self.running_bytes - sum(one.event_bytes for one in self._running.values())
        if kept + stored.size > limit:
            raise Overloaded(
                f"{len(self._running)} background responses run and take {kept} bytes; this one "
                f"would add {stored.size}, and the limit is {limit}; send it again when one of "
                "them is over, or without background",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._drop_events(self.running_bytes + stored.size - limit)
        self._running[response_id] = stored
        self.running_bytes += stored.size
        self._add(response_id, stored)

    def update(self, response_id: str) -> None:
        """Take what the run of a response has changed; without effect if it is not stored."""
        stored = self._stored.get(response_id)
        if stored is None or stored.run is None:
            return
        stored.body = stored.run.body
        own_limit = stored.first_bytes + self._max_bytes // EVENT_PARTS
        stored.run.drop_events(stored.run.nbytes - own_limit)
        self._resize(response_id, stored)
        if stored.run.over:
            self._end(response_id)
            self._use(response_id)
        self._drop_events(self.running_bytes - self._max_bytes // RUNNING_PARTS)
        self._evict(self._clock())

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
            if found in self._running:
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
                f"previous_response_id: {self.missing(last)}; send the whole conversation in input",
                field="previous_response_id",
            )
        for found in chain:
            self._use(found)
        return history[::-1]

    def missing(self, response_id: str) -> str:
        """Return the text of the error for a response that is not stored."""
        return (
            f"the response {response_id!r} is not stored (any more): responses are kept for "
            f"{MAX_AGE_S / 3600:g} hours, in at most {self._max_bytes // 2**20} MiB of memory, and "
            "end with the daemon"
        )

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
            if response_id not in self._running:
                dropped.append(response_id)
                excess -= stored.size
        for response_id in dropped:
            self._drop(response_id)

    def _add(self, response_id: str, stored: Stored) -> None:
        for found in list(self._chain(stored.previous, stored.owner)):
            self._use(found)
        self._stored[response_id] = stored
        self.bytes += stored.size
        self._evict(stored.used_at)

    def _drop_events(self, excess: int) -> None:
        """Drop so many bytes of events of the responses that run, of the one with most of them."""
        while excess > 0 and self._running:
            largest = max(self._running, key=lambda one: self._running[one].event_bytes)
            stored, before = self._running[largest], self.running_bytes
            if stored.run is None or not stored.run.nbytes:
                return
            stored.run.drop_events(excess)
            self._resize(largest, stored)
            excess -= before - self.running_bytes

    def _resize(self, response_id: str, stored: Stored) -> None:
        grown = stored.measure() - stored.size
        stored.size += grown
        self.bytes += grown
        if response_id in self._running:
            self.running_bytes += grown

    def _end(self, response_id: str) -> None:
        if (stored := self._running.pop(response_id, None)) is not None:
            self.running_bytes -= stored.size

    def _drop(self, response_id: str) -> None:
        self._end(response_id)
        self.bytes -= self._stored.pop(response_id).size
