"""Lets other processes compile modules of MLX's own operations while a model is loaded (CUDA).

MLX compiles a module when an operation first runs, for 4 to 5 s on an H200, and one after another.
If none are stored yet, other processes run operations that the load will need later
(`kvd.worker.serving.compile_mlx`). When an operation has run there, the worker copies its modules
to where MLX looks for them. The worker compiles whatever is missing.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.artifacts.modules import Modules
from kvd.worker.serving import compile_mlx
from kvd.worker.serving.compile_mlx import DONE, END, FOLDER

FEWEST_BYTES = 24 << 30
"""Least memory of a device on which this is done. The CUDA context of each process takes some
0.5 GB."""
TIMEOUT_S = 60.0
"""For how long a load waits for the processes once it needs their modules."""
DTYPES = ("bfloat16", "float16", "float32")
_TICK_S = 0.5

_log = logging.getLogger("kvd.worker")


class Helper:
    """A process that compiles modules."""

    def __init__(self, command: list[str], found: Modules) -> None:
        """Start it. Raises ``OSError`` or ``RuntimeError``."""
        # Without this variable, the process creates a folder of its own.
        variables = {k: v for k, v in os.environ.items() if k != modules.FOLDER_VARIABLE}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
        )
        self._found = found
        self._thread = threading.Thread(target=self._place, name="kvd-modules", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            with self._process as process:
                process.kill()
            raise

    def _place(self) -> None:
        """Place the modules of each operation that the process reports."""
        folder: Path | None = None
        with self._process as process:  # at its end, closes the pipes and waits
            assert process.stdout is not None
            for line in process.stdout:
                content = line.rstrip(b"\n")
                if content.startswith(FOLDER):
                    folder = Path(os.fsdecode(content.removeprefix(FOLDER)))
                    if folder.parent != self._found.folder.parent:
                        break
                elif content.startswith(DONE) and folder is not None:
                    names = os.fsdecode(content.removeprefix(DONE)).split("\t")
                    self._found.adopt(folder, names)
                elif content == END:
                    break
        if process.returncode:
            _log.info("a process for MLX's modules ended with status %d", process.returncode)

    def finish(self, until: float) -> None:
        """Wait for the process until this time (`time.monotonic`), then end it."""
        while self._thread.is_alive() and (left := until - time.monotonic()) > 0:
            self._found.progress("compiling MLX's modules", 0.9)
            self._thread.join(min(left, _TICK_S))
        if self._thread.is_alive():
            _log.warning(
                "a process that compiles MLX's modules was ended after %g s; the worker compiles"
                " the rest itself, which takes longer",
                TIMEOUT_S,
            )
            self._process.kill()
            self._thread.join()


_running: list[Helper] = []


def start(config: Mapping[str, Any], *, alone: bool = True) -> None:
    """Start the processes if no modules of MLX's own operations are stored; `finish` waits.

    ``config``: the model's, for its dtype. ``alone``: False for a gang, which starts none.
    """
    found, info = modules.current(), mx.device_info()
    memory = int(info.get("total_memory") or info.get("memory_size") or 0)
    if found is None or found.has_restored or memory < FEWEST_BYTES or not alone:
        return
    dtype = str(config.get("torch_dtype") or config.get("dtype"))
    try:
        # Held until this process ends: of several first loads, one starts the processes.
        modules.lock(found.folder.parent.parent)
        for task in compile_mlx.TASKS:
            command = [sys.executable, "-P", "-m", compile_mlx.__name__, task]
            command.append(dtype if dtype in DTYPES else DTYPES[0])
            _running.append(Helper(command, found))
    except (OSError, RuntimeError) as error:
        _log.info("MLX's modules are compiled one after another: %s", error)


def finish() -> None:
    """Wait for the processes, at most `TIMEOUT_S`; then end them."""
    until = time.monotonic() + TIMEOUT_S
    while _running:
        _running.pop().finish(until)
