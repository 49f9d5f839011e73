"""The environment of workers, and of tools such as `kvctl bench-kv`."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import kvd
from kvd.host import openblas_core


def environment(blas: Path | None) -> dict[str, str]:
    """Return this process's environment with the BLAS to preload and the path of kvd."""
    variables = dict(os.environ)

    def prepend(name: str, path: Path) -> None:
        before = variables.get(name)
        variables[name] = f"{path}:{before}" if before else str(path)

    if blas is not None:
        prepend("LD_PRELOAD", blas)
        variables["KVD_BLAS_PRELOADED"] = str(blas)
        # OpenBLAS's idle threads spin. On a busy machine they took a third of a worker's CPU time
        # as system time. With 2^12 cycles it was a sixth, at the same speed or better.
        variables.setdefault("OPENBLAS_THREAD_TIMEOUT", "12")
        if (core := openblas_core.override(blas)) is not None:
            variables[openblas_core.VARIABLE] = core
    root = Path(kvd.__file__).parent.parent
    if root != Path(sysconfig.get_path("purelib")):  # a checkout that may not be installed
        prepend("PYTHONPATH", root)
    return variables
