"""The daemon's process: ``python -m kvd.daemon.serve OPTIONS``.

`kvd serve` becomes it under the process id that it has. What reads command lines would otherwise
stay in memory for the daemon's whole life: 10 of 45 MB.
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
    """Replace this process by one that serves."""
    # -P: the working folder must not decide what is imported.
    command = [sys.executable, "-P", "-m", "kvd.daemon.serve", options.packed()]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment(None))  # noqa: S606 - no shell is meant


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop; return the exit code. Errors of ours become a line on stderr."""
    from kvd.daemon import daemon  # noqa: PLC0415 - not in the process that becomes this one

    try:
        return daemon.run(Options.unpacked(arguments[0]))
    except KvdError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        return exits.of(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
