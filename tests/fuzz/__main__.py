"""Fuzzes for minutes: ``python -m tests.fuzz --minutes 10 [TARGET ...]``.

The time is divided among the targets. An input that fails is made small, kept in the target's
corpus, and ends its target. ``--json FILE`` adds the counts to a file of results.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import structlog

from tests.fuzz.campaign import Failure, run_for
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"unknown target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    names = options.targets or list(TARGETS)
    results = [_run(name, 60 * options.minutes / len(names), options.seed) for name in names]
    if options.json is not None:
        _add(options.json, results)
    return int(any(result["failed"] for result in results))


def _run(name: str, seconds: float, number: int) -> dict[str, Any]:
    target, began = TARGETS[name](), time.monotonic()
    tried, failed = 0, None
    try:
        tried = run_for(target, seconds, number)
    except Failure as failure:
        failure.cause.__notes__ = []  # the description of the strategy
        traceback.print_exception(failure.cause, limit=-8, chain=False)
        failed = str(failure.save(target))
    result = {
        "target": name,
        "command": f"python -m tests.fuzz --minutes {seconds / 60:g} --seed {number} {name}",
        "inputs": tried,
        "seconds": round(time.monotonic() - began, 1),
        "failed": failed,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return result


def _add(file: Path, results: list[dict[str, Any]]) -> None:
    """Replace the results of these targets in a file."""
    known = json.loads(file.read_text()) if file.exists() else []
    names = {result["target"] for result in results}
    kept = [result for result in known if result["target"] not in names]
    file.write_text(json.dumps([*kept, *results], indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
