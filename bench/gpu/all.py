"""Run every measurement that needs a GPU, the most important first, within a time.

    python -m bench.gpu.all --out DIR [--seconds 560] [--only NAME ...] [--skip NAME ...]
                            [--models /dev/shm] [--disk DIR] [--data DIR] [--minutes 7]
    python -m bench.gpu.all --out DIR --seconds 560 --plan
    python -m bench.gpu.all --out DIR --dry

Each measurement is a process with a time limit of its own. It writes DIR/NAME.json and
DIR/NAME.log, and DIR/summary.json gets its outcome and its bars. One that is not expected to fit
into the rest of ``--seconds`` is not started. One that fails does not stop the others.

Called again with the same DIR, the command runs what is missing: first what never ran, then what
failed. ``--plan`` prints the calls that this takes. ``--dry`` runs everything with tiny models and
is meant for a CPU: it shows that all commands and files are right.

``--models`` is a folder for random weights, which later calls use again. ``--disk`` is a folder on
the disk whose prefixes are measured. ``--data`` is what `demo_training.prepare` wrote, and
``--minutes`` is the time of training. The exit status is 1 if a measurement failed; a missed bar is
no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.gpu.measurements import Measurement, measurements

ROOT = Path(__file__).parents[2]
DRY_LIMIT_S = 300.0
_KILL_S = 15.0
"""Seconds from SIGTERM to SIGKILL."""
_TAIL = 1500
"""Characters of a failed measurement's log in the summary."""
_MOST_WRITING = 0.5
"""Most of a measurement's expected time that writing its model's weights is expected to take."""
_DONE, _FAILED, _SKIPPED = "done", "failed", "skipped"


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int | None
    """Exit status; None if it was ended at its time limit."""
    seconds: float


def run(command: Sequence[str], log: Path, limit_s: float, environment: dict[str, str]) -> Ended:
    """Run a command with its output in ``log``; end it and its children after ``limit_s``."""
    start = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return Ended(status, time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started in its group."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


class _NoTimeError(Exception):
    """The rest of the call is too short for a measurement."""


class Summary:
    """Outcomes by measurement, in a file that is written after each."""

    def __init__(self, file: Path, *, dry: bool) -> None:
        self._file = file
        self._dry = dry
        content = json.loads(file.read_text()) if file.exists() else {}
        if content.get("dry", dry) != dry:
            raise SystemExit(f"{file} has results {'without' if dry else 'of'} --dry")
        self.machine: dict[str, Any] = content.get("machine", {})
        self.found: dict[str, dict[str, Any]] = content.get("measurements", {})

    def status(self, name: str) -> str:
        """Return a measurement's outcome; empty if it never ran."""
        return str(self.found.get(name, {}).get("status", ""))

    def note(self, name: str, outcome: dict[str, Any]) -> None:
        """Record an outcome and write the file."""
        self.found[name] = outcome
        self.write()

    def write(self) -> None:
        content = {"dry": self._dry, "machine": self.machine, "measurements": self.found}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(self._file)


def order(some: Sequence[Measurement], summary: Summary) -> list[Measurement]:
    """Return the measurements that are not done: first those that have not failed before."""
    left = [one for one in some if summary.status(one.name) != _DONE]
    return sorted(left, key=lambda one: summary.status(one.name) == _FAILED)


def calls(some: Sequence[Measurement], seconds: float) -> list[list[Measurement]]:
    """Return what each call of ``seconds`` seconds runs if all take as long as expected.

    Measurements that fit into no call are left out.
    """
    left = [one for one in some if one.estimate_s <= seconds]
    found = []
    while left:
        rest, now = seconds, list[Measurement]()
        for one in left:
            if one.estimate_s <= rest:
                now.append(one)
                rest -= one.estimate_s
        found.append(now)
        left = [one for one in left if one not in now]
    return found


class Runner:
    """Runs measurements one after the other."""

    def __init__(self, options: argparse.Namespace, summary: Summary) -> None:
        self._options = options
        self._summary = summary
        self._end = time.monotonic() + options.seconds
        self._folders = {
            "disk": str(options.disk),
            "data": str(options.data),
            "trained": str(options.models / "kvd-trained"),
        }

    @property
    def rest_s(self) -> float:
        """Seconds until the end of the call."""
        return self._end - time.monotonic()

    def run(self, some: Sequence[Measurement]) -> list[str]:
        """Run measurements; return the names of those for which there is no time."""
        left_out = []
        for one in some:
            if not self._options.dry and one.estimate_s > self.rest_s:
                left_out.append(one.name)
                continue
            if missing := one.missing(self._folders, dry=self._options.dry):
                reason = f"missing: {', '.join(missing)}"
                outcome: dict[str, Any] = {"status": _SKIPPED, "reason": reason}
            else:
                print(f"{one.name}: expected to take {one.estimate_s:.0f} s", flush=True)
                try:
                    outcome = self._measure(one)
                except _NoTimeError:
                    left_out.append(one.name)
                    continue
            self._summary.note(one.name, outcome)
            print("\n".join(described(one.name, outcome)), flush=True)
        return left_out

    def _measure(self, one: Measurement) -> dict[str, Any]:
        """Return the outcome; raises `_NoTimeError` if writing weights took too long."""
        out: Path = self._options.out
        dry = self._options.dry
        file, log = out / f"{one.name}.json", out / f"{one.name}.log"
        for path in (file, log):
            path.unlink(missing_ok=True)
        start = time.monotonic()
        try:
            model = self._model(one.dry_model if dry else one.model, log) if one.model else ""
        except RuntimeError as error:
            return _failure(str(error), start, log)
        written_s = min(time.monotonic() - start, _MOST_WRITING * one.estimate_s)
        if not dry and one.estimate_s - written_s > self.rest_s:
            raise _NoTimeError
        folders = self._folders | {"model": model}
        command = ["-m", one.module, *one.arguments(folders, str(file), dry=dry)]
        limit_s = DRY_LIMIT_S if dry else min(one.limit_s, self.rest_s - _KILL_S)
        environment = one.variables | {"TMPDIR": str(self._options.models)}
        ended = run([sys.executable, *command], log, limit_s, environment)
        if ended.status == 0 and file.exists():
            outcome = {"status": _DONE, "seconds": round(time.monotonic() - start, 1)}
        elif ended.status is None:
            outcome = _failure(f"took more than {limit_s:.0f} s", start, log)
        else:
            outcome = _failure(f"exit status {ended.status}", start, log)
        variables = [f"{name}={value}" for name, value in one.variables.items()]
        command = [*variables, "python", *command]
        return outcome | {"command": shlex.join(command), "bars": _bars(one, file)}

    def _model(self, shape: str, log: Path) -> str:
        """Return a folder with random weights of a shape, which is written if it is missing."""
        folder = self._options.models / f"kvd-{shape}"
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=self._options.models) as name:
                new = Path(name, shape)
                command = ["-m", "bench.gpu", "--shape", shape, "--folder", str(new)]
                ended = run([sys.executable, *command], log, max(1.0, self.rest_s), {})
                if ended.status is None:
                    raise _NoTimeError
                if ended.status != 0:
                    raise RuntimeError(f"the model of shape {shape} was not written")
                new.rename(folder)
        return str(folder)


def _failure(reason: str, start: float, log: Path) -> dict[str, Any]:
    seconds = round(time.monotonic() - start, 1)
    tail = log.read_text(errors="replace")[-_TAIL:]
    return {"status": _FAILED, "reason": reason, "seconds": seconds, "log": tail}


def _bars(one: Measurement, file: Path) -> list[dict[str, Any]]:
    """Return the bars of a report, which may be incomplete or missing."""
    try:
        return one.bars(json.loads(file.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def described(name: str, outcome: dict[str, Any]) -> Iterator[str]:
    """Yield lines about an outcome: status, bars, the end of a failed measurement's log."""
    seconds = f", {outcome['seconds']:.0f} s" if "seconds" in outcome else ""
    reason = f": {outcome['reason']}" if "reason" in outcome else ""
    yield f"{name}: {outcome['status']}{seconds}{reason}"
    for bar in outcome.get("bars", []):
        yield f"  {_verdict(bar)}"
    yield from (f"  | {line}" for line in outcome.get("log", "").splitlines()[-12:])


def _verdict(bar: dict[str, Any]) -> str:
    """Return a bar as a line. Those of `bench.serve` have a ratio of two sides as their value."""
    value = bar.get("value", bar.get("ratio"))
    verdict = "pass" if bar["passed"] else "MISS"
    word = "at least" if bar["at_least"] else "at most"
    of = f" ({bar['trace']}, {bar['ours']})" if "trace" in bar else ""
    return f"{bar['what']}{of}: {value:.3f}, {word} {bar['limit']:g}: {verdict}"


def machine() -> dict[str, Any]:
    """Return what results depend on. MLX is not imported, because it would take device memory."""
    names = ("mlx", "mlx-cuda-13", "mlx-lm", "torch", "pytest")
    versions = dict[str, str]()
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "device": _device(),
    }


def _device() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        return found.stdout.strip()
    return "no NVIDIA GPU"


def show_plan(every: Sequence[Measurement], summary: Summary, seconds: float) -> None:
    """Print each measurement's time, and the calls that are needed for those that are not done."""
    left = order(every, summary)
    for one in every:
        status = summary.status(one.name) or "never ran"
        print(f"{one.name:16}{one.estimate_s:6.0f} s, limit {one.limit_s:6.0f} s  {status}")
    print(f"{sum(one.estimate_s for one in left):.0f} s are left")
    if seconds == float("inf"):
        return
    planned = calls(left, seconds)
    for number, some in enumerate(planned, 1):
        names = ", ".join(one.name for one in some)
        print(f"call {number}, {sum(one.estimate_s for one in some):.0f} s: {names}")
    if too_long := [one.name for one in left if one.estimate_s > seconds]:
        print(f"too long for a call: {', '.join(too_long)}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [one.name for one in measurements(1.0)]
    memory = Path("/dev/shm")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time of this call")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="NAME")
    parser.add_argument(
        "--models", type=Path, default=memory if memory.is_dir() else Path(tempfile.gettempdir())
    )
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--data", type=Path, default=Path("work"))
    parser.add_argument("--minutes", type=float, default=7.0, help="time of training")
    parser.add_argument("--plan", action="store_true", help="only print what would run")
    parser.add_argument("--dry", action="store_true", help="tiny models, for a CPU")
    options = parser.parse_args(arguments)
    for name in ("out", "models", "disk", "data"):
        setattr(options, name, getattr(options, name).resolve())
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; return 1 if something failed."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    summary = Summary(options.out / "summary.json", dry=options.dry)
    wanted = set(options.only) - set(options.skip)
    every = [one for one in measurements(options.minutes) if one.name in wanted]
    if options.plan:
        show_plan(every, summary, options.seconds)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    summary.machine = machine()
    summary.write()
    left_out = Runner(options, summary).run(order(every, summary))
    if left_out:
        print(f"no time for {', '.join(left_out)}: call again with the same --out")
    failed = [one.name for one in every if summary.status(one.name) == _FAILED]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
