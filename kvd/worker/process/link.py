"""The worker's socket with its framing: commands in, reports out."""

from __future__ import annotations

import select
import socket
from collections import deque

from kvd.worker.process.outbox import Outbox
from protocol.framing import FrameDecoder, decode_command
from protocol.worker import Command, Report

_READ_BYTES = 64 * 1024
_WRITE_BYTES = 64 * 1024
"""Bytes of reports that are encoded at a time. Encoded reports can no longer be merged."""


class Orphaned(BaseException):
    """The daemon closed its end of the socket. No error, so that no handler of errors keeps it."""


class Link:
    """Reads commands and writes reports without blocking, except in `wait` and its callers.

    Methods that use the socket raise `Orphaned` if the daemon is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._decoder = FrameDecoder()
        self._outbox = Outbox()
        self._unsent = b""
        self.commands: deque[Command] = deque()
        """Commands that were read but not handled yet."""

    def put(self, report: Report) -> None:
        self._outbox.put(report)

    def pump(self) -> None:
        """Read available commands and write what the socket takes."""
        self._read()
        self.send()

    def next_command(self) -> Command:
        while not self.commands:
            self.wait(None)
        return self.commands.popleft()

    def flush(self) -> None:
        while self.send():
            self.wait(None)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until the socket can be read or written, or the timeout passes; then `pump`."""
        unsent = self.send()
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if unsent else 0))
        self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        self.pump()

    def _read(self) -> None:
        try:
            while data := self._sock.recv(_READ_BYTES):
                self.commands.extend(map(decode_command, self._decoder.receive(data)))
                if len(data) < _READ_BYTES:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            raise Orphaned from error
        raise Orphaned

    def send(self) -> bool:
        """Write what the socket takes; return whether reports are left."""
        try:
            while self._unsent or len(self._outbox):
                if not self._unsent:
                    self._unsent = self._outbox.take(_WRITE_BYTES)
                sent = self._sock.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return True
        except OSError as error:
            raise Orphaned from error
        return False
