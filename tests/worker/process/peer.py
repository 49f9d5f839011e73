"""The daemon's side of a worker, for tests. The worker is a process, or a loop in a thread."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time

from kvd.worker.process.link import Orphaned
from kvd.worker.process.loop import Loop
from protocol.framing import FrameDecoder, decode_report, encode_frame
from protocol.types import Sampling
from protocol.worker import (
    Grant,
    LoadModel,
    MemoryRequested,
    Ready,
    RowFailed,
    RowFinished,
    RowTokens,
    Submit,
)

DEADLINE_S = 30.0
"""Seconds to wait for a worker: far above the usual milliseconds, because the CPU may be busy."""


def submit(rid, prompt="hello", **fields):
    sampling = fields.pop("sampling", Sampling())
    return Submit(rid=rid, prompt=prompt, sampling=sampling, **fields)


class Peer:
    """Sends commands, grants memory up to a budget and keeps all reports."""

    deadline_s = DEADLINE_S

    def __init__(self, sock, budget=2**40):
        self.sock = sock
        self.budget = budget
        self.granted = 0
        self.reports = []
        self._ends = []
        self._decoder = FrameDecoder()
        sock.settimeout(self.deadline_s)

    def send(self, *commands):
        for command in commands:
            self.sock.sendall(encode_frame(command))

    def read(self, timeout_s=DEADLINE_S):
        """Read once; return False at the end of the stream."""
        ready, _, _ = select.select([self.sock], [], [], timeout_s)
        if not ready:
            return True
        with contextlib.suppress(ConnectionResetError):
            if data := self.sock.recv(1 << 20):
                for frame in self._decoder.receive(data):
                    self._take(decode_report(frame))
                return True
        return False

    def _take(self, report):
        self.reports.append(report)
        if isinstance(report, (RowFinished, RowFailed)):
            self._ends.append(report)
        if isinstance(report, MemoryRequested):
            fits = report.total_bytes <= self.budget
            if fits:
                self.granted = report.total_bytes
            self.send(
                Grant(
                    seq=report.seq,
                    total_bytes=self.granted,
                    granted=fits,
                    available_bytes=self.budget - self.granted,
                    limit_bytes=self.budget,
                    budget_bytes=self.budget,
                )
            )

    def wait_for(self, holds):
        """Read until ``holds`` returns a true value; return that value."""
        end = time.monotonic() + self.deadline_s
        while not (found := holds()):
            assert time.monotonic() < end, f"timeout; the last reports: {self.reports[-3:]}"
            assert self.read(1.0) or holds(), (
                f"the worker is gone; the last reports: {self.reports[-3:]} {self.exit_report()}"
            )
        return found

    def exit_report(self):
        """Return the exit status and stderr of a worker that has ended, for messages."""
        return None, ""

    def of(self, kind, rid=None):
        found = [report for report in self.reports if isinstance(report, kind)]
        return found if rid is None else [report for report in found if report.rid == rid]

    def load(self, source="fake:tps=0", **fields):
        self.send(LoadModel(source=source, **fields))
        return self.wait_for(lambda: self.of(Ready))[0].info

    def ends(self):
        return list(self._ends)

    def wait_for_end(self, *rids):
        self.wait_for(lambda: set(rids) <= {end.rid for end in self.ends()})
        return [next(end for end in self.ends() if end.rid == rid) for rid in rids]

    def tokens(self, rid):
        found = []
        for report in self.of(RowTokens, rid):
            assert report.index == len(found)
            found += report.tokens
        return found

    def text(self, rid):
        return "".join(report.text for report in self.of(RowTokens, rid))

    def read_all(self):
        while self.read():
            pass


class Process(Peer):
    """A worker process."""

    def __init__(self, engine="fake", **options):
        daemon, worker = socket.socketpair()
        command = [sys.executable, "-m", "kvd.worker", str(worker.fileno()), "--engine", engine]
        self.process = subprocess.Popen(
            command, pass_fds=[worker.fileno()], stderr=subprocess.PIPE, text=True
        )
        worker.close()
        super().__init__(daemon, **options)

    def wait(self, timeout_s=DEADLINE_S):
        return self.process.wait(timeout_s)

    def errors(self):
        """Return the stderr of a worker that has exited."""
        return self.process.stderr.read()

    def exit_report(self):
        return self.wait(), self.errors()

    def close(self):
        self.sock.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


class Thread(Peer):
    """A loop in a thread, with an engine that the test can inspect."""

    def __init__(self, engine, *, sock_buffer=None, **options):
        daemon, worker = socket.socketpair()
        if sock_buffer:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sock_buffer)
        self.engine = engine
        self._loop = Loop(worker, engine, **options)
        self._worker_sock = worker
        self.outcome = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        super().__init__(daemon)
        self._thread.start()

    def _run(self):
        try:
            self._loop.run()
            self.outcome = "done"
        except Orphaned:
            self.outcome = "orphaned"
        finally:
            self._worker_sock.close()

    def join(self):
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.outcome

    def close(self):
        self.sock.close()
        self.join()


def wait_until(holds, deadline_s=DEADLINE_S):
    end = time.monotonic() + deadline_s
    while not (found := holds()):
        assert time.monotonic() < end, "timeout"
        time.sleep(0.005)
    return found


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return bool(status) and not status.startswith("Z")
