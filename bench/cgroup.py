"""A control group of its own for a command, with a memory limit: created, read and removed here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_REMOVE_S = 10.0
"""Seconds to wait until the last process of the group is gone."""


class NoCgroup(Exception):
    """This machine does not let the process create a group; the message has the reason."""


@dataclass(frozen=True)
class Cgroup:
    """A group with a memory limit, of version 1 or 2."""

    folder: Path
    v2: bool

    @property
    def wrapper(self) -> list[str]:
        """Words before a command that start it in the group."""
        script = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", script, "sh"]

    @property
    def oom_kills(self) -> int:
        return self._table("memory.events" if self.v2 else "memory.oom_control")["oom_kill"]

    @property
    def peak_bytes(self) -> int:
        """Most bytes so far, with the page cache, which the kernel drops when memory is short."""
        name = "memory.peak" if self.v2 else "memory.max_usage_in_bytes"
        return int((self.folder / name).read_text())

    @property
    def private_bytes(self) -> int:
        """Bytes now, without the page cache."""
        return self._table("memory.stat")["anon" if self.v2 else "total_rss"]

    def _table(self, name: str) -> dict[str, int]:
        lines = (line.split() for line in (self.folder / name).read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines}


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Cgroup]:
    """Create a group below this process's own one; raise `NoCgroup` if that is not possible."""
    own, v2 = _own()
    folder = own / f"kvd-bench-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoCgroup(f"{folder} cannot be created ({error.strerror})") from error
    try:
        limit = folder / ("memory.max" if v2 else "memory.limit_in_bytes")
        try:
            limit.write_text(str(nbytes))
        except OSError as error:
            raise NoCgroup(f"{limit} cannot be written ({error.strerror})") from error
        yield Cgroup(folder, v2)
    finally:
        _remove(folder)


def _own() -> tuple[Path, bool]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        raise NoCgroup("this system has no control groups") from error
    groups = {line.split(":", 2)[1]: line.split(":", 2)[2].strip("/") for line in lines}
    if "memory" in groups:
        return ROOT / "memory" / groups["memory"], False
    return ROOT / groups.get("", ""), True


def _remove(folder: Path) -> None:
    end = time.monotonic() + _REMOVE_S
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
