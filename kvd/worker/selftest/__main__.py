"""Runs the trials: ``python -m kvd.worker.selftest [--quick] [--skip NAME]…``.

Before each one a line ``{"begin": NAME}``, after it its outcome, on stdout; whoever reads them
knows which trial ended the process, and starts another one without it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial

import msgspec

from kvd.worker.selftest import attention, memory, model
from kvd.worker.selftest.outcome import REPORT, Outcome


def trials(*, quick: bool) -> dict[str, Callable[[], Outcome]]:
    """Return them in their order: what they need of one another comes first."""
    found: dict[str, Callable[[], Outcome]] = {
        "attention, plain": partial(attention.reference, quick=quick),
        "attention, kernels": partial(attention.kernels, quick=quick),
        "flush in place": partial(memory.flush, quick=quick),
        "limit of freed buffers": memory.limits,
        "footprint": memory.footprint,
        "pressure and limits": memory.pressure,
    }
    return found if quick else found | {"the demo model": model.probed}


def main() -> None:
    """Run those that are not to be left out."""
    parser = argparse.ArgumentParser(prog="kvd.worker.selftest")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip", action="append", default=[], help="a trial's name")
    arguments = parser.parse_args()
    for name, trial in trials(quick=arguments.quick).items():
        if name in arguments.skip:
            continue
        _say({"begin": name})
        try:
            outcome = trial()
        except Exception as error:  # noqa: BLE001 - the others are to be run all the same
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            outcome = Outcome(name, "fail", said, REPORT, {"traceback": traceback.format_exc()})
        _say({"outcome": outcome})


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
