"""The environment of the processes that compute: workers, and tools such as `kvctl bench-kv`."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import kvd
from kvd.host import openblas_core


def environment(blas: Path | None) -> dict[str, str]:
    """Return our environment with the BLAS to preload and where kvd is."""
    variables = dict(os.environ)
    if blas is not None:
        before = variables.get("LD_PRELOAD", "")
        variables["LD_PRELOAD"] = f"{blas}:{before}" if before else str(blas)
        variables["KVD_BLAS_PRELOADED"] = str(blas)
        # OpenBLAS's idle threads spin, and took a third of a worker's CPU time as system time on
        # a busy machine; with 2^12 cycles that was a sixth, at the same speed or better.
        variables.setdefault("OPENBLAS_THREAD_TIMEOUT", "12")
        if (core := openblas_core.override(blas)) is not None:
            variables[openblas_core.VARIABLE] = core
    root = Path(kvd.__file__).parent.parent
    if root != Path(sysconfig.get_path("purelib")):  # a checkout, perhaps not installed
        before = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = f"{root}:{before}" if before else str(root)
    return variables
