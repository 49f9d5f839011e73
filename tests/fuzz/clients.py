"""Bytes of a client of the socket through a whole system on simulated time.

Nothing fails inside, each request that was accepted ends exactly once or its connection closes, and
another client is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from actors.status import KnownModel
from protocol import messages
from protocol.framing import LineDecoder, decode_event, encode_line
from protocol.messages import Event, Request, is_last
from protocol.session import OPS, ServerSession
from tests.fuzz.mutations import edited_bytes, edited_json, edited_lines, either
from tests.fuzz.target import Check, Target
from tests.sim import loop
from tests.sim.world import World, world

_PIECE = 1000
"""Bytes that arrive at once."""
_NAMES = sorted({name for kind in Request.__args__ for name in kind.__struct_fields__})


def _edit(draw: DrawFn, line: bytes) -> bytes:
    if draw(st.integers(0, 3)):
        return draw(edited_json([line], _NAMES))
    return draw(edited_bytes([line], [b'"op":"%s"' % op.encode() for op in OPS]))


class Clients(Target):
    name = "clients"
    examples = 60

    def inputs(self) -> SearchStrategy[bytes]:
        seeds = self.seeds()
        return either(edited_lines(seeds, _edit), edited_bytes(seeds))

    @contextmanager
    def checking(self) -> Iterator[Check]:
        yield lambda data: loop.run(_check(data))


class Hostile:
    """A connection that sends any bytes and reads everything."""

    def __init__(self, system: World) -> None:
        self.events: list[Event] = []
        self.closed = False
        self._lines = LineDecoder(limit=1 << 30)
        self._connection = system.system.connect(
            write=self._written, close=self._close, backlog=lambda: 0
        )

    def _written(self, data: bytes) -> None:
        assert not self.closed, "written after close"
        self.events += map(decode_event, self._lines.feed(data))

    def _close(self) -> None:
        self.closed = True

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            self._connection.receive(data[start : start + _PIECE])

    def cancel_all(self) -> None:
        """Cancel all requests: one may ask for more tokens than fit in the time.

        Also those with a last event, which may be that of another request with the same id.
        """
        for number, target in enumerate({event.id for event in self.events}):
            if not self.closed:
                self.send(encode_line(messages.Cancel(id=f"fuzzer {number}", target=target)))

    def disconnect(self) -> None:
        self._connection.closed()


async def _check(data: bytes) -> None:
    known = {"lazy": KnownModel("fake:lazy", listed=True)}
    data += b"\n"
    async with world(known=known, budget=500) as it:
        hostile = Hostile(it)
        hostile.send(data)
        await loop.asyncio.sleep(60)
        hostile.cancel_all()
        await loop.asyncio.sleep(600)
        if not it.system.finished.done():
            assert (await it.client().ask(messages.Hello)).pid == 1
            it.check()
        if not hostile.closed:
            _check_ends(data, hostile)
        hostile.disconnect()


def _check_ends(data: bytes, hostile: Hostile) -> None:
    """Each line got exactly one last event; only an ``events`` that follows may still run."""
    session = ServerSession()
    asked: Counter[str] = Counter()
    for start in range(0, len(data), _PIECE):
        for found in session.receive(data[start : start + _PIECE]):
            asked[found.id] += 1
    ends = Counter(event.id for event in hostile.events if is_last(event))
    following = {
        found.id
        for found in session.open.values()
        if isinstance(found, messages.Events) and found.follow
    }
    for key, count in asked.items():
        assert ends[key] <= count, f"{key!r} ended too often"
        assert ends[key] == count or key in following, f"{key!r} has no last event"
