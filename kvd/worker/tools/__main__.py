"""Runs a measuring tool: ``python -m kvd.worker.tools calibrate|bench_kv ARGUMENTS``.

Imports mlx-lm as workers do (`kvd.worker.lean_imports`), which must come before the tool's own
imports and saves about 0.8 s of CPU time.
"""

from __future__ import annotations

import importlib
import sys

from kvd.worker import lean_imports

TOOLS = ("bench_kv", "calibrate")


def main() -> None:
    if sys.argv[1:2] not in [[name] for name in TOOLS]:
        sys.exit(f"usage: python -m kvd.worker.tools {'|'.join(TOOLS)} ARGUMENTS")
    name = sys.argv.pop(1)
    lean_imports.install()
    importlib.import_module(f"kvd.worker.tools.{name}").main()


if __name__ == "__main__":
    main()
