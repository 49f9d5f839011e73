"""Code that one rank runs before its own program, in the first start of a gang only.

The rank's Python reads it as `sitecustomize`, so a real daemon starts the rank as always.
"""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

_SITE = """
import os, sys
arguments = sys.orig_argv
if "--rank" in arguments and arguments[arguments.index("--rank") + 1] == "{rank}":
    try:
        os.unlink({first!r})
    except FileNotFoundError:
        pass
    else:
        exec({code!r}, {{}})
"""
_HOLD = """
import time
open({holding!r}, "w").close()
while not os.path.exists({released!r}):
    time.sleep(0.01)
"""
_LATE = """
import mlx.core as mx
init = mx.distributed.init

def late(**arguments):
{hold}
    return init(**arguments)

mx.distributed.init = late
"""


def in_first_start(folder: Path, patch: pytest.MonkeyPatch, rank: int, code: str) -> None:
    """Let this rank run the code when a daemon that starts from now on first starts it."""
    first = folder / "first start"
    first.touch()
    site = _SITE.format(rank=rank, first=str(first), code="import os\n" + code)
    (folder / "sitecustomize.py").write_text(site)
    before = os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", f"{folder}:{before}" if before else str(folder))


class Hold:
    """Holds a rank in the first start of its gang, until `release`."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, rank: int, *, joining: bool = False
    ) -> None:
        """``joining``: hold it when it joins MLX's group, not at its very start."""
        self._holding, self._released = folder / "holding", folder / "released"
        code = _HOLD.format(holding=str(self._holding), released=str(self._released))
        if joining:
            code = _LATE.format(hold=textwrap.indent(code, "    "))
        in_first_start(folder, patch, rank, code)

    @property
    def holds(self) -> bool:
        return self._holding.exists()

    def release(self) -> None:
        self._released.touch()


def addresses(pid: int) -> list[tuple[str, int]]:
    """Return host and port of all ranks, from the command line of one of them."""
    command = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"--ring (\S+)", line)
    assert found, line
    pairs = [address.rpartition(":") for address in found[1].split(",")]
    return [(host, int(port)) for host, _, port in pairs]
