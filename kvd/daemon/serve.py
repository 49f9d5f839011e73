"""The daemon's process: ``python -m kvd.daemon.serve OPTIONS``.

`kvd serve` replaces itself with it, to free the 10 MB that the command line's modules take.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from kvd.config.options import Options
from kvd.host import exits
from kvd.host.environment import environment
from protocol.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Sequence


def become(options: Options) -> NoReturn:
    # -P: do not import modules from the working folder.
    command = [sys.executable, "-P", "-m", "kvd.daemon.serve", options.packed()]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment(None))  # noqa: S606 - no shell is meant


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped; return the exit code. A `KvdError` is printed to stderr."""
    from kvd.daemon import daemon  # noqa: PLC0415 - `become` does not need it

    try:
        return daemon.run(Options.unpacked(arguments[0]))
    except KvdError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        return exits.of(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
