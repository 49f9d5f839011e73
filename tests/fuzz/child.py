"""Checks in a process of their own, with limits of time and memory.

The process answers each input with one line. A limit that is exceeded, or a process that dies, is a
failure of the input. The next input gets a new process.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import traceback
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.fuzz.target import Check, Target

LIMIT_S = 60.0
"""Seconds for one input, of which most take a tenth of one."""
IMPORT_S = 120.0
"""Seconds for the first input of a target, which imports libraries."""
LIMIT_BYTES = 512 * 1024 * 1024
"""Memory that an input may take in addition to what the process had before the first one."""


class InChild(Target):
    """A target whose check runs in the child. All such targets share it, since it starts slowly."""

    @abstractmethod
    def serve(self, folder: Path) -> Check:
        """Prepare the child and return the check; ``folder`` is private to the target."""

    @contextmanager
    def checking(self) -> Iterator[Check]:
        yield partial(_check, self.name)


_children: list[_Child] = []


def _check(name: str, data: bytes) -> None:
    if not _children:
        _children.append(_Child())
    try:
        _children[0].check(name, data)
    except _Lost:
        _end()
        raise


@atexit.register
def _end() -> None:
    while _children:
        _children.pop().end()


class _Lost(AssertionError):
    """The process died, or took too long."""


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.fuzz import child; child.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._prepared: set[str] = set()

    def check(self, name: str, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            head = f"{name} {len(data)}\n"
            self._process.stdin.write(head.encode() + data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Lost("the process has ended") from None
        error = self._answer(LIMIT_S if name in self._prepared else IMPORT_S)
        self._prepared.add(name)
        if error:
            raise AssertionError(error)

    def _answer(self, seconds: float) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise _Lost(f"no result within {seconds:g} s")
        if not (line := self._process.stdout.readline()):
            raise _Lost(f"the process died with status {self._process.wait()}")
        return str(json.loads(line))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _limit_memory() -> None:
    if sys.platform != "linux":
        return  # other systems do not enforce it
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    most = pages * os.sysconf("SC_PAGESIZE") + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def main() -> None:
    from tests.fuzz.targets import TARGETS

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print
    checks: dict[str, Check] = {}
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        while head := sys.stdin.buffer.readline():
            name, size = head.decode().split()
            data = sys.stdin.buffer.read(int(size))
            try:
                if name not in checks:
                    target = TARGETS[name]()
                    assert isinstance(target, InChild)
                    checks[name] = target.serve(Path(folder))
                    _limit_memory()
                checks[name](data)
            except BaseException:  # noqa: BLE001 - reported to the parent
                answer = traceback.format_exc(limit=-6)
            else:
                answer = ""
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
