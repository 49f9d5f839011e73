"""Runs a command with the BLAS that workers preload: ``python -m tools.with_blas COMMAND...``.

MLX's own BLAS on Linux is many times slower, so tests that compute run with OpenBLAS if it is
installed. They run with the kernels for this machine's processor: an inherited processor type is
dropped, because kernels of another type round differently, and are slower.

There is one exception. The kernels of OpenBLAS 0.3.21 for Haswell and Zen round a row of a product
differently at each place in the batch, so models without kvd's own operations fail tests that
compare bits. On these processors tests use the kernels for Sandy Bridge, which round alike at every
place and take twice as long.
"""

from __future__ import annotations

import os
import sys

from kvd.host import blas, openblas_core
from kvd.host.environment import environment

ROUND_BY_PLACE = {"Haswell", "Zen"}
EXACT = "Sandybridge"


def main(command: list[str]) -> None:
    """Replace this process with the command."""
    os.environ.pop(openblas_core.VARIABLE, None)
    library = blas.choose("auto")
    wanted = environment(library)
    core = wanted.get(openblas_core.VARIABLE) or (library and openblas_core.detected(library))
    if core in ROUND_BY_PLACE:
        wanted[openblas_core.VARIABLE] = EXACT
    names = ("LD_PRELOAD", "OPENBLAS_THREAD_TIMEOUT", openblas_core.VARIABLE)
    chosen = {name: wanted[name] for name in names if name in wanted}
    os.execvpe(command[0], command, os.environ | chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
