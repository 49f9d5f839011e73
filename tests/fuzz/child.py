"""Checks in a process of their own, with limits of time and memory.

The process answers each input with one line. A limit that is exceeded, or a process that dies, is a
failure of the input. The next input gets a new process.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.target import Check, Target

LIMIT_S = 20.0
"""Seconds for one input, which usually takes a tenth of one."""
LIMIT_BYTES = 512 * 1024 * 1024
"""Memory that an input may take in addition to what the process had before the first one."""


class InChild(Target):
    """A target whose check runs in a child."""

    def serve(self, folder: Path) -> Check:
        """Prepare the child and return the check; ``folder`` is private to the process."""
        raise NotImplementedError

    @contextmanager
    def checking(self) -> Iterator[Check]:
        children: list[_Child] = []

        def check(data: bytes) -> None:
            if not children:
                children.append(_Child(self.name))
            try:
                children[0].check(data)
            except _Lost:
                children.pop().end()
                raise

        yield check
        for child in children:
            child.end()


class _Lost(AssertionError):
    """The process died, or took too long."""


class _Child:
    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.fuzz import child; child.main()", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._answer(120)  # imports

    def check(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(data).to_bytes(4, "big") + data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Lost("the process has ended") from None
        if error := self._answer(LIMIT_S):
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
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    from tests.fuzz.targets import TARGETS

    target = TARGETS[sys.argv[1]]()
    assert isinstance(target, InChild)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print

    def answer(text: str) -> None:
        answers.write(json.dumps(text).encode() + b"\n")
        answers.flush()

    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        check = target.serve(Path(folder))
        _limit_memory()
        answer("")
        while head := sys.stdin.buffer.read(4):
            data = sys.stdin.buffer.read(int.from_bytes(head, "big"))
            try:
                check(data)
            except BaseException:  # noqa: BLE001 - reported to the parent
                answer(traceback.format_exc(limit=-6))
            else:
                answer("")
