"""Decides whether this process uses the native library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kvd.worker.device import on_cpu
from kvd.worker.engine import ReportProgress
from kvd.worker.native import build, operations


@dataclass(frozen=True)
class Activation:
    """The library, or the reason why it is not used. Neither if MLX computes on a GPU."""

    library: ModuleType | None
    reason: str | None = None

    @property
    def status(self) -> str | None:
        return "on" if self.library is not None else self.reason


def activate(progress: ReportProgress, ranks: int = 1) -> Activation:
    """Build and install the library if MLX computes on the CPU; call before models are imported.

    ``ranks``: processes that share the CPU for one model. ``KVD_NATIVE=off`` in the environment
    disables the library.
    """
    if not on_cpu():
        return Activation(None)
    if os.environ.get("KVD_NATIVE") == "off":
        return Activation(None, "switched off")
    if not build.is_built():
        progress("building native operations, once", 0.02)
    try:
        library = build.load()
    except build.NotBuiltError as error:
        return Activation(None, str(error))
    library.use_threads(max(1, thread_count() // ranks))
    operations.install(library)
    return Activation(library)


def thread_count() -> int:
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(allowed, _quota()))


def _quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many processors a container may keep busy, by cgroup v2.

    The file contains a quota and a period, such as ``200000 100000``, or ``max`` without a limit.
    """
    try:
        quota, period = file.read_text("utf-8").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no container, or no limit
        return 1 << 16
