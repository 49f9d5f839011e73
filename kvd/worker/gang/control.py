"""The sockets between the leader of a gang and its followers, and what all ranks must agree on.

Control messages never go through MLX's collectives: a rank that waits in a collective may use a
whole core (`ring.join`), and one that waits for a socket uses none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

_HEADER = 4
"""Bytes of a message's length field, big-endian."""
_READ_BYTES = 1 << 18
_T = TypeVar("_T")

_encode = msgspec.msgpack.Encoder().encode


class PeerLost(BaseException):
    """A rank closed its control socket. No `Exception`, so that no handler catches it."""


class Diverged(BaseException):
    """A rank is about to compute something else than the leader, so the gang must end."""


class Channel:
    """Messages over a blocking socket to one rank. Raises `PeerLost` at the end of the stream."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._buffer = bytearray()

    def send(self, body: bytes) -> None:
        try:
            self._sock.sendall(len(body).to_bytes(_HEADER, "big") + body)
        except OSError as error:
            raise PeerLost from error

    def receive(self) -> bytes:
        """Return the next message; sleeps until there is one."""
        while True:
            if len(self._buffer) >= _HEADER:
                end = _HEADER + int.from_bytes(self._buffer[:_HEADER], "big")
                if len(self._buffer) >= end:
                    body = bytes(self._buffer[_HEADER:end])
                    del self._buffer[:end]
                    return body
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError as error:
                raise PeerLost from error
            if not data:
                raise PeerLost
            self._buffer += data


class Peers(Protocol):
    """The ranks of a gang, as one of them sees the others."""

    rank: int
    size: int

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. All must call it, in the same order.

        ``name``: what the value is; `Diverged` is raised if a rank exchanges something else.
        """


class LeaderPeers:
    """The followers, as the leader sees them."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.rank, self.size = 0, len(channels) + 1
        self._channels = channels

    def send(self, message: Any) -> None:
        body = _encode(message)
        for channel in self._channels:
            channel.send(body)

    def exchange(self, name: str, value: Any) -> list[Any]:
        found = [(name, value)]
        found += [msgspec.msgpack.decode(channel.receive()) for channel in self._channels]
        self.send(found)
        return _values(name, found)


class FollowerPeers:
    """The leader, as a follower of this ``rank`` sees it."""

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._channel = channel

    def receive(self) -> bytes:
        return self._channel.receive()

    def exchange(self, name: str, value: Any) -> list[Any]:
        self._channel.send(_encode((name, value)))
        return _values(name, msgspec.msgpack.decode(self._channel.receive()))


def _values(name: str, found: list[Any]) -> list[Any]:
    names = [rank_name for rank_name, _ in found]
    if any(one != name for one in names):
        raise Diverged(f"the ranks of the gang are at different points of the load: {names}")
    return [value for _, value in found]


def require_equal(peers: Peers, name: str, value: _T) -> _T:
    """Raise `Diverged` unless all ranks have the same value."""
    values = peers.exchange(name, value)
    if any(one != values[0] for one in values):
        raise Diverged(f"the ranks of the gang differ in {name}: {values}")
    return value


def total(peers: Peers, name: str, value: int) -> int:
    """Return the sum of all ranks' values."""
    add: Callable[[list[int]], int] = sum
    return add(peers.exchange(name, value))
