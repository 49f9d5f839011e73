"""Compiles modules of MLX's own operations in other processes while a model is loaded (CUDA).

MLX compiles a module when an operation first runs, for 4 to 5 s on an H200, and one after another.
On the first load of a machine, other processes therefore run operations that the load will need
later. The worker places each module where MLX looks for it once its process says that it is done.
It compiles itself whatever is missing.

A process ends when its last module has been placed, or when the worker closes its input or dies.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.artifacts.modules import Modules
from kvd.worker.cache import pool
from kvd.worker.sampling import sampler

FEWEST_BYTES = 24 << 30
"""Memory of a device on which this is done. The CUDA context of each process takes some 0.5 GB."""
TIMEOUT_S = 60.0
"""For how long a load waits for the processes at its end."""

_log = logging.getLogger("kvd.worker")


def _pages(dtype: mx.Dtype) -> Iterator[Callable[[], None]]:
    for one in (mx.uint32, dtype):
        yield lambda one=one: pool.compile_modules([one])  # type: ignore[misc]


def _sampling(_dtype: mx.Dtype) -> Iterator[Callable[[], None]]:
    yield sampler.compile_modules


TASKS: dict[str, Callable[[mx.Dtype], Iterator[Callable[[], None]]]] = {
    "pages": _pages,
    "sampling": _sampling,
}
"""What each process runs, by its name."""


class Helper:
    """A process that compiles modules."""

    def __init__(self, command: list[str], found: Modules) -> None:
        """Start it. Raises ``OSError``."""
        # Its folder is one of its own: without this variable it creates one.
        variables = {k: v for k, v in os.environ.items() if k != modules.FOLDER_VARIABLE}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
        )
        self._found = found
        self._thread = threading.Thread(target=self._place, name="kvd-modules", daemon=True)
        self._thread.start()

    def _place(self) -> None:
        """Place the modules of each operation that the process reports."""
        folder: Path | None = None
        with self._process as process:  # at its end, closes the pipes and waits
            assert process.stdout is not None
            for line in process.stdout:
                if folder is None:
                    folder = Path(os.fsdecode(line.rstrip(b"\n")))
                elif line == b"end\n":
                    break
                else:
                    self._found.adopt(folder)
        if process.returncode:
            _log.info("a process for MLX's modules ended with status %d", process.returncode)

    def finish(self, until: float) -> None:
        """Wait for the process until this time (`time.monotonic`), then end it."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("MLX's modules are not compiled after %g s", TIMEOUT_S)
            self._process.kill()
            self._thread.join()


_running: list[Helper] = []


def start(config: Mapping[str, Any], *, alone: bool = True) -> None:
    """Start the processes if this is a machine's first load; `finish` waits for them.

    ``config``: the model's, for its dtype. ``alone``: whether the model is in this process only.
    """
    found, info = modules.current(), mx.device_info()
    memory = int(info.get("total_memory") or info.get("memory_size") or 0)
    if found is None or found.has_restored or memory < FEWEST_BYTES or not alone:
        return
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    for task in TASKS:
        command = [sys.executable, "-P", "-m", __name__, task, dtype]
        try:
            _running.append(Helper(command, found))
        except OSError as error:
            _log.info("MLX's modules are compiled one after another: %s", error)


def finish() -> None:
    """Wait until all modules that the processes compile are in place."""
    until = time.monotonic() + TIMEOUT_S
    while _running:
        _running.pop().finish(until)


def main(arguments: list[str]) -> int:
    """Run a task's operations; report the folder of the modules, and each operation."""
    task, dtype = arguments
    parent = threading.Thread(target=_end_with_input, daemon=True)
    parent.start()
    modules.activate(lambda *_: None)
    found = modules.current()
    if found is None:
        return 1
    _say(str(found.folder))
    for run in TASKS[task](getattr(mx, dtype, mx.bfloat16)):
        run()
        _say("done")
    _say("end")
    parent.join()  # the folder may be deleted once this process has ended
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not a buffered read, which would hold a lock at exit
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
