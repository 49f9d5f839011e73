"""`kvctl doctor --selftest`: trials of computing, the system and a daemon, in separate processes.

If a process dies, its trial fails and the other trials continue in a new process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO

import msgspec
from msgspec.structs import replace

from kvd.doctor import living, speed, system
from kvd.doctor.ended_process import death, last_error
from kvd.doctor.finding import REPORT, Finding, Section, fail
from kvd.doctor.scene import Scene
from kvd.doctor.speed import Measured, Model
from kvd.host import blas
from kvd.host.environment import environment

MODULE = "kvd.worker.selftest"
_TRIAL_S = 180.0
"""Longer than any trial takes, including the compilation of kernels."""
_MOST_DEATHS = 8


class _Line(msgspec.Struct, frozen=True):
    begin: str | None = None
    outcome: Finding | None = None


def run(
    scene: Scene,
    model: Model,
    measured: Measured,
    *,
    quick: bool = False,
    service: bool = False,
) -> Iterator[str | Section]:
    """Run all trials, and leave the comparison with mlx-lm in ``measured``.

    ``quick``: takes less than a minute on two cores and starts no daemon.
    """
    yield from _section("Selftest: computing", computing(quick=quick))
    yield from _section("Selftest: the system", system.trials(scene))
    limits = speed.QUICK if quick else speed.FULL
    yield from _section("Selftest: speed", speed.compare(scene, model, limits, measured))
    if not quick:
        yield from _section("Selftest: a daemon", living.daemon())
    if service:
        yield from _section("Selftest: a service", living.service())


def _section(title: str, steps: Iterator[str | Finding]) -> Iterator[str | Section]:
    findings = []
    for step in steps:
        if isinstance(step, str):
            yield step
        else:
            findings.append(step)
    yield Section(title, findings)


def computing(
    *, quick: bool, module: str = MODULE, most_s: float = _TRIAL_S
) -> Iterator[str | Finding]:
    """Run a worker's trials; the next process skips a trial that ended its process."""
    done: list[str] = []
    for _ in range(_MOST_DEATHS):
        begun: str | None = None
        since = time.monotonic()
        with (
            tempfile.TemporaryFile("w+") as errors,
            _process(module, done, errors, quick=quick) as process,
        ):
            assert process.stdout is not None
            watchdog = _Watchdog(process, most_s)
            for text in process.stdout:
                line = _read(text)
                if line is not None and line.begin is not None:
                    begun, since = line.begin, time.monotonic()
                    watchdog.again()
                    yield begun
                elif line is not None and line.outcome is not None:
                    done.append(line.outcome.name)
                    begun = None
                    yield _with_seconds(line.outcome, time.monotonic() - since)
            watchdog.stop()
            status = process.wait()
            words = last_error(errors)
            reason = f"{death(status)}{words and f'; {words}'}"
        if begun is None:
            if status:
                yield fail("worker", f"the process ended early: {reason}", REPORT)
            return
        if watchdog.fired:
            reason = f"killed, because it took more than {most_s:g} s{words and f'; {words}'}"
        yield fail(begun, f"its process died: {reason}", REPORT)
        done.append(begun)


def _with_seconds(finding: Finding, seconds: float) -> Finding:
    return replace(finding, numbers={**finding.numbers, "seconds": round(seconds, 2)})


@contextlib.contextmanager
def _process(
    module: str, done: list[str], errors: IO[str], *, quick: bool
) -> Iterator[subprocess.Popen[str]]:
    arguments = [word for name in done for word in ("--skip", name)]
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", module, *(["--quick"] if quick else []), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment(blas.choose("auto")) | {"PYTHONFAULTHANDLER": "1"},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


class _Watchdog:
    """Kills a process that reports nothing for too long."""

    def __init__(self, process: subprocess.Popen[str], most_s: float) -> None:
        self._process, self._most_s = process, most_s
        self.fired = False
        self._timer: threading.Timer | None = None
        self.again()

    def again(self) -> None:
        self.stop()
        self._timer = threading.Timer(self._most_s, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self.fired = True
        self._process.kill()


def _read(text: str) -> _Line | None:
    try:
        return msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError:
        return None  # output of a library
