"""The process that compiles modules of MLX's own operations (`kvd.worker.serving.mlx_modules`).

    python -P -m kvd.worker.serving.compile_mlx TASK DTYPE

It writes lines to its output: the folder of its modules, the modules of each operation that has
run, and the end. It ends when its input does, and after the last line waits for that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

FOLDER, DONE, END = b"folder ", b"done ", b"end"
"""Beginnings of the lines. Names of modules are separated by tabs."""


def pages(dtype: Any) -> Iterator[Callable[[], None]]:
    """Yield calls that compile what reading and writing pages takes."""
    import mlx.core as mx  # noqa: PLC0415 - after `main` has prepared the process

    from kvd.worker.cache import pool  # noqa: PLC0415

    for one in (mx.uint32, dtype):
        yield lambda one=one: pool.compile_modules([one])  # type: ignore[misc]


def sampling(_dtype: Any) -> Iterator[Callable[[], None]]:
    """Yield a call that compiles what sampling settings take."""
    from kvd.worker.sampling import sampler  # noqa: PLC0415 - after `main` has prepared the process

    yield sampler.compile_modules


TASKS: dict[str, Callable[[Any], Iterator[Callable[[], None]]]] = {
    "pages": pages,
    "sampling": sampling,
}


def main(arguments: list[str]) -> int:
    """Run a task's operations."""
    task, dtype = arguments
    parent = threading.Thread(target=_end_with_input, daemon=True)
    parent.start()
    # Libraries may print to the standard output.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    from kvd.worker import lean_imports  # noqa: PLC0415 - a parent may die during these imports
    from kvd.worker.process import interpreter  # noqa: PLC0415

    interpreter.prepare()
    lean_imports.install()
    import mlx.core as mx  # noqa: PLC0415

    from kvd.worker.artifacts import modules  # noqa: PLC0415

    modules.activate(lambda *_: None)
    found = modules.current()
    if found is None:
        return 1
    out.write(FOLDER + os.fsencode(found.folder) + b"\n")
    for run in TASKS[task](getattr(mx, dtype)):
        run()
        # Only what has run is complete.
        out.write(DONE + os.fsencode("\t".join(modules.names_in(found.folder))) + b"\n")
    out.write(END + b"\n")
    parent.join()  # the folder may be deleted once this process has ended
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not a buffered read, which would hold a lock at exit
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
