"""Runs the checks: ``python -m kvd.worker.selftest [--quick] [--skip NAME]…``.

Prints a line ``{"begin": NAME}`` before each check and its outcome after it. If the process
crashes, the reader knows which check caused it, and starts a process that skips that check.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial

import msgspec

from kvd.worker.selftest import attention, memory
from kvd.worker.selftest.outcome import REPORT, Outcome


def checks(*, quick: bool) -> dict[str, Callable[[], Outcome]]:
    """Return the checks in order: a check that others depend on comes first."""
    return {
        "attention, plain": partial(attention.reference, quick=quick),
        "attention, kernels": partial(attention.kernels, quick=quick),
        "flush in place": partial(memory.flush, quick=quick),
        "limit of freed buffers": memory.limits,
        "footprint": memory.footprint,
        "pressure and limits": memory.pressure,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvd.worker.selftest")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip", action="append", default=[], help="name of a check")
    arguments = parser.parse_args()
    for name, check in checks(quick=arguments.quick).items():
        if name in arguments.skip:
            continue
        _print({"begin": name})
        try:
            outcome = check()
        except Exception as error:  # noqa: BLE001 - the other checks still run
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(name, "fail", text, REPORT, {"traceback": traceback.format_exc()})
        _print({"outcome": outcome})


def _print(message: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
