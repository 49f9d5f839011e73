"""Run the tests of kernels and GPU layers on this machine's device, and count the outcomes.

    python -m bench.gpu.device_tests [--tests PATH ...] [--processes 6] [--json FILE]

The file is written after each test, so that an interrupted run keeps its results. Warnings are no
errors, and pytest-asyncio need not be installed. MLX multiplies float32 without TF32,
and launches kernels without graphs, as in workers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.bars import Bar

TESTS = ("tests/worker/kernels/test_device.py", "tests/worker/gpu")
_LONGEST_ERROR = 2000


class Outcomes:
    """A plugin of pytest that counts outcomes by file, and writes them."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._start = time.perf_counter()
        self._files: dict[str, Counter[str]] = {}
        self._failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's call, or what happened instead of it."""
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::")[0]
        self._files.setdefault(name, Counter())[report.outcome] += 1
        if report.failed:
            self._failures[report.nodeid] = report.longreprtext[-_LONGEST_ERROR:]
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be imported as a failure."""
        if report.failed:
            self._files.setdefault(report.nodeid, Counter())["failed"] += 1
            self._failures[report.nodeid] = report.longreprtext[-_LONGEST_ERROR:]
            self._write()

    def as_dict(self) -> dict[str, Any]:
        """Return the results for the JSON file."""
        idle = [name for name, counts in self._files.items() if not counts["passed"]]
        bars = [
            Bar("tests that failed", len(self._failures), 0),
            Bar("files of which no test passed", len(idle), 0),
        ]
        return {
            "files": self._files,
            "failures": self._failures,
            "seconds": time.perf_counter() - self._start,
            "bars": [bar.as_dict() for bar in bars],
        }

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self.as_dict(), indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; return 0 if they ran to the end, whatever their outcomes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.device_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--processes", type=int, default=6, help="0: run them in this process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    plain = ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"]
    spread = ["-n", str(options.processes)] if options.processes else []
    outcomes = Outcomes(options.json)
    os.environ |= {"MLX_ENABLE_TF32": "0", "MLX_USE_CUDA_GRAPHS": "0"}  # the processes inherit them
    found = pytest.main(["-q", *plain, *spread, *options.tests], plugins=[outcomes])
    print(json.dumps(outcomes.as_dict()["files"]))
    return 0 if found in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} else int(found)


if __name__ == "__main__":
    sys.exit(main())
