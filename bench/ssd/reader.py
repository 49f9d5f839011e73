r"""Measure how fast records of stored prefixes are read from the page cache, without an engine.

    python -m bench.ssd.reader [--records 256] [--record-kib 336 2176] [--threads 1 2]
                               [--rounds 7] [--store DIR] [--json FILE]

One file of random records is written for each size, plain and encrypted. Then, in GB/s:

* pread: read into one block of memory, nothing else.
* checked: one thread reads and checks, or decrypts, one record after another.
* N threads: `BackgroundReader` reads and checks in N threads, while this thread copies each record
  to one of several places in turn, as the engine copies them into pools.

Each number is the best of ``--rounds`` rounds, in which all ways alternate. *CPU* is the CPU time
of the process in the same round, for 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_io import NOT_YET, STAGED_RECORDS, BackgroundReader, SegmentRecord
from protocol.record_cipher import RecordCipher
from protocol.record_file import RecordReader, RecordWriter
from protocol.record_format import PLAIN, RecordFormat
from protocol.segments import segment_path

_PLACES = 16
"""Places that records are copied to in turn, more than a processor's cache holds."""


@dataclass
class Best:
    """The fastest round of one way to read."""

    seconds: float = float("inf")
    cpu_s: float = 0.0

    def note(self, work: Callable[[], None]) -> None:
        """Run the work once more."""
        start, cpu = time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - start
        if seconds < self.seconds:
            self.seconds, self.cpu_s = seconds, time.process_time() - cpu


class StoredFile:
    """One file of ``count`` random records of ``nbytes`` each, below ``folder``."""

    def __init__(self, folder: Path, form: RecordFormat, count: int, nbytes: int) -> None:
        self._folder = folder
        self._form = form
        self._key = secrets.token_bytes(32)
        self._path = segment_path(folder, self._key)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._memory = RecordMemory(STAGED_RECORDS * nbytes)
        self._memory.open()
        self._places = np.zeros((_PLACES, nbytes), np.uint8)
        file = RecordWriter(self._path, form, sync=False)
        for _ in range(count):
            file.add(np.random.default_rng().bytes(nbytes))
        file.finish()
        self.nbytes = count * nbytes

    def read(self) -> None:
        """Read the file into one block."""
        block = self._memory.take(self._places.shape[1])
        fd, at = os.open(self._path, os.O_RDONLY), 0
        try:
            while size := os.preadv(fd, [block], at):
                at += size
        finally:
            os.close(fd)
            self._memory.free_oldest()

    def check(self) -> None:
        """Read and check the records in this thread."""
        block = self._memory.take(self._places.shape[1])
        with RecordReader(self._path, self._form) as records:
            while (record := records.next_unread()) is not None:
                record.read(block)
        self._memory.free_oldest()

    def copy(self, threads: int) -> None:
        """Read and check the records in threads, and copy them in this one."""
        reader = BackgroundReader(
            self._folder,
            [self._key],
            lambda path: RecordReader(path, self._form),
            self._memory,
            threads=threads,
        )
        count = 0
        while (item := reader.next_record()) is NOT_YET or isinstance(item, SegmentRecord):
            if isinstance(item, SegmentRecord):
                self._places[count % _PLACES] = np.frombuffer(item.content, np.uint8)
                count += 1
            else:
                reader.wait(1.0)
        if count * self._places.shape[1] != self.nbytes:
            raise RuntimeError(f"{count} records were read: {item}")


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of each size and format."""
    cases = []
    forms = {"plain": PLAIN, "encrypted": RecordCipher(secrets.token_bytes(32))}
    for kib in options.record_kib:
        for name, form in forms.items():
            file = StoredFile(folder, form, options.records, kib << 10)
            ways = {"pread": file.read, "checked": file.check}
            for count in options.threads:
                ways[f"{count} threads"] = lambda count=count, file=file: file.copy(count)
            best = {way: Best() for way in ways}
            for _ in range(options.rounds):
                for way, work in ways.items():
                    best[way].note(work)
            cases.append(_case(name, kib, file.nbytes, best))
            print(_line(cases[-1]), flush=True)
    return cases


def _case(form: str, kib: int, nbytes: int, best: dict[str, Best]) -> dict[str, Any]:
    gb = nbytes / 1e9
    return {
        "format": form,
        "record_kib": kib,
        "bytes": nbytes,
        "gb_per_s": {way: gb / one.seconds for way, one in best.items()},
        "cpu_s_per_gb": {way: one.cpu_s / gb for way, one in best.items()},
    }


def _line(case: dict[str, Any]) -> str:
    parts = [
        f"{way} {speed:.2f} GB/s ({case['cpu_s_per_gb'][way]:.2f} s CPU)"
        for way, speed in case["gb_per_s"].items()
    ]
    return f"{case['format']:10}{case['record_kib']:6} KiB: {', '.join(parts)}"


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ssd.reader",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--record-kib", type=int, nargs="+", default=[336, 2176])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--store", help="folder for the files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kvd-reader-", dir=options.store) as folder:
        cases = measure(options, Path(folder))
    result = {
        "command": shlex.join(["python", "-m", "bench.ssd.reader", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "cases": cases,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
