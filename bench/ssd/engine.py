r"""Restore a chat's prefix from disk in one process with an engine, and compare with prefill.

    python -m bench.ssd.engine --shape qwen3-0.6b qwen3-8b [--tokens 8192 32768 100000]
                               [--runs 2] [--stream-reads 2] [--minutes 8]
                               [--models DIR] [--store DIR] [--json FILE]
    python -m bench.ssd.engine --model FOLDER …

For each length, the second turn of a chat is answered

* cold: nothing is cached. The first time is reported separately, because it compiles kernels.
* ram: the first turn's checkpoint is in memory.
* disk: memory has no checkpoint, and the files are in the system's page cache.
* disk, uncached: the files are not in the page cache either.

Each answer has 16 greedy tokens with logprobs, which must be equal to the bit. Then seven streams
decode while prefixes are read (`bench.ssd.streams`). *Read alone* is the time to read and check the
files without an engine. After each length, the results so far are written. A length that would
exceed ``--minutes`` is skipped.

Each ``--shape`` is measured in a process of its own, and has a JSON file with its name. Its model
has random weights and is written to a folder in ``--models`` first. ``--store`` is where segments
are written: a folder on the disk to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

from bench.bars import Bar
from bench.ssd import parts, prompts, streams
from bench.ssd.bars import BEYOND_PAGES, GAPS, bars_of
from bench.ssd.files import Files
from bench.ssd.models import open_model
from bench.ssd.worker import Answer, Worker
from kvd.config.config import Config
from kvd.host import memory
from kvd.worker.cache import device_copy
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from protocol.kv import KVSpec

PREFIX_BYTES = 1 << 40
"""Limit of the prefix cache in memory, which is not what is measured."""
NEW_TOKENS = 16


class Bench:
    """The measurements of one model."""

    def __init__(
        self, worker: Worker, model: str, files: Files, runs: int, stream_reads: int
    ) -> None:
        self._worker = worker
        self._fp16_bytes = prompts.fp16_bytes_per_token(model)
        self._files = files
        self._runs = runs
        self._stream_reads = stream_reads

    def warm_up(self) -> None:
        """Compile what the first prompt and the first steps need."""
        self._cold(prompts.tokens(3 * self._chunk, seed=1), 1)

    @property
    def _chunk(self) -> int:
        return Config().chunk

    def case(self, tokens: int) -> dict[str, Any]:
        """Measure a chat whose first turn has about ``tokens`` tokens."""
        first = prompts.tokens(tokens // self._chunk * self._chunk + PAGE_TOKENS, seed=tokens)
        second = first + prompts.tokens(prompts.TURN_TOKENS, seed=tokens + 1)
        cold = [self._cold(second, number) for number in range(1 + self._runs)]
        print(f"  {tokens} cold {_seconds(cold)}", flush=True)
        case: dict[str, Any] = {
            "tokens": tokens,
            "prompt_tokens": len(second),
            "cold_first_s": cold[0].ttft_s,
            "cold_s": statistics.median(answer.ttft_s for answer in cold[1:]),
            "cold_equal": all(it.equals(cold[0]) for it in cold),
        }
        if (written := self._write(first)) is None:
            return case  # prefill is too short to be worth a file
        case |= {"written": written, "read_alone": self._files.read_alone()}
        found = {"ram": [self._worker.chat(second, max_tokens=NEW_TOKENS)]}
        with parts.measured() as first_read:
            found["disk"] = [self._restored(second)]
        case["first_read"] = first_read.as_dict()
        found["disk"] += [self._restored(second) for _ in range(self._runs - 1)]
        found["disk, uncached"] = [self._restored(second, cached=False) for _ in range(self._runs)]
        for name, answers in found.items():
            case[name] = _summary(answers, case["cold_s"])
            case[name]["equal_to_cold"] = all(it.equals(cold[0]) for it in answers)
            print(f"  {tokens} {name} {_seconds(answers)}", flush=True)
        self._files.bring_to_page_cache()
        case["streams"] = streams.measure(self._worker, first, rounds=self._stream_reads)
        self._files.delete_all()
        return case

    def _cold(self, tokens: list[int], number: int) -> Answer:
        """Answer a prompt under a salt of its own, which nothing is cached for."""
        self._worker.forget()
        self._worker.store.allows = False
        answer = self._worker.chat(tokens, max_tokens=NEW_TOKENS, salt=f"cold {number}")
        self._worker.store.allows = True
        self._worker.forget()
        if answer.cached:
            raise RuntimeError(f"{answer.cached} tokens of a cold prompt were cached")
        return answer

    def _write(self, first: list[int]) -> dict[str, Any] | None:
        """Answer the first turn, and let its prefix be written; None: it is not worth a file."""
        worker = self._worker
        del worker.store.written[:]
        answer = worker.chat(first, max_tokens=NEW_TOKENS)
        worker.write_all()
        if not worker.store.written:
            return None
        tokens = max(report.segment.tokens for report in worker.store.written)
        nbytes = sum(report.segment.nbytes for report in worker.store.written)
        pages = full_pages(tokens) * worker.info.page_bytes
        seconds = sum(report.seconds for report in worker.store.written)
        return {
            "first_turn_s": answer.ttft_s,
            "segments": len(worker.store.written),
            "tokens": tokens,
            "file_bytes": nbytes,
            "page_bytes": pages,
            "beyond_pages": nbytes / pages - 1,
            "fp16_bytes": tokens * self._fp16_bytes,
            "seconds": seconds,
            "gb_per_s": nbytes / seconds / 1e9,
        }

    def _restored(self, tokens: list[int], *, cached: bool = True) -> Answer:
        """Answer a prompt whose prefix is on disk only."""
        self._worker.forget()
        if not cached:
            self._files.drop_from_page_cache()
        return self._worker.chat(tokens, max_tokens=NEW_TOKENS)


def _summary(answers: list[Answer], cold_s: float) -> dict[str, Any]:
    ttft_s = statistics.median(answer.ttft_s for answer in answers)
    reads = [answer.read for answer in answers if answer.read is not None]
    return {
        "ttft_s": ttft_s,
        "share_of_cold": ttft_s / cold_s,
        "runs_s": [answer.ttft_s for answer in answers],
        "cached_share": min(it.cached / it.prompt_tokens for it in answers),
        "restored_from_disk": len(reads),
        "read_s": statistics.median(it.seconds for it in reads) if reads else None,
    }


def _seconds(answers: list[Answer]) -> str:
    return " ".join(f"{answer.ttft_s:.3f} s" for answer in answers)


def verdicts(case: dict[str, Any]) -> list[Bar]:
    """Return the bars of one length with their values; none if its prefix was not stored."""
    if "written" not in case:
        return []
    bars = [
        bar
        for name in ("disk", "disk, uncached")
        for bar in bars_of(name, case[name], case["cold_s"])
    ]
    return [
        *bars,
        Bar("bytes beyond the pages", case["written"]["beyond_pages"], BEYOND_PAGES),
        Bar("p99 between tokens during a read", case["streams"]["ratio"], GAPS),
    ]


def show(case: dict[str, Any]) -> None:
    """Print the bars of one length."""
    if "written" not in case:
        print(f"  not stored: prefill takes only {case['cold_s']:.2f} s", flush=True)
    for bar in verdicts(case):
        print(f"  {bar}", flush=True)
    if "streams" in case:
        found = case["streams"]
        print(
            f"  streams: {found['undisturbed_p99_s'] * 1e3:.1f} ms between tokens (p99),"
            f" {found['reading_p99_s'] * 1e3:.1f} ms during reads of {found['read_s']:.2f} s,"
            f" {found['during_p99_s'] * 1e3:.1f} ms with the prefill of the rest"
            f" ({found['during_ratio']:.2f});"
            f" in CPU time {found['cpu_undisturbed_p99_s'] * 1e3:.1f} ms"
            f" and {found['cpu_reading_p99_s'] * 1e3:.1f} ms ({found['cpu_ratio']:.2f})",
            flush=True,
        )


class Budget:
    """The time of the whole run."""

    def __init__(self, minutes: float) -> None:
        self._start = time.monotonic()
        self._seconds = 60 * minutes

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start

    def allows(self, tokens: int, done: list[dict[str, Any]], runs: int) -> bool:
        """Return whether another length is expected to fit.

        Its prefill is estimated from the longest one so far, with time quadratic in the length.
        """
        estimate = 10.0
        if done:
            last = done[-1]
            cold_s = max(1.0, last["cold_first_s"])
            estimate += (3 + runs) * cold_s * (tokens / last["tokens"]) ** 2
        return self.spent_s + estimate < self._seconds


def run(options: argparse.Namespace, model: str, store: Path) -> dict[str, Any]:
    """Measure all lengths; write the results after each."""
    budget = Budget(options.minutes)
    worker = Worker(
        model,
        store,
        kv=KVSpec(prefix_cache=PREFIX_BYTES),
        chunk=Config().chunk,
        budget_bytes=memory.default_budget(memory.reader().host()),
    )
    info = worker.info
    print(f"{info.device}, loaded in {worker.load_s:.1f} s: {info.attention_path}", flush=True)
    print(f"pages are copied by a kernel: {device_copy.is_used()}", flush=True)
    bench = Bench(worker, model, Files(store), options.runs, options.stream_reads)
    bench.warm_up()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.ssd.engine", *sys.argv[1:]]),
        "device": info.device,
        "shape": options.shape,
        "attention_path": info.attention_path,
        "kv_scheme": info.kv_scheme,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "prefill_chunk": Config().chunk,
        "load_average": os.getloadavg(),
        "load_s": worker.load_s,
        "copied_by_kernel": device_copy.is_used(),
        "ready_s": budget.spent_s,
        "cases": [],
        "skipped": [],
        "failed": [],
    }
    for tokens in sorted(options.tokens):
        if budget.allows(tokens, result["cases"], options.runs):
            try:
                case = bench.case(tokens)
                show(case)
                case["bars"] = [bar.as_dict() for bar in verdicts(case)]
                result["cases"].append(case)
            except (RuntimeError, MemoryError) as error:  # such as a full device
                result["failed"].append(f"{tokens}: {error!r}"[:300])
                print(result["failed"][-1], flush=True)
        else:
            result["skipped"].append(tokens)
            print(f"{tokens}: skipped, {budget.spent_s:.0f} s are spent", flush=True)
        result["seconds"] = budget.spent_s
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


def run_shapes(options: argparse.Namespace) -> None:
    """Measure each shape in a process of its own; print a table of all ratios."""
    budget, table = Budget(options.minutes), [HEADING]
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            file = (options.json or Path(folder, "ssd.json")).with_stem(
                f"{(options.json or Path('ssd')).stem}-{shape}"
            )
            minutes = (60 * options.minutes - budget.spent_s) / 60
            command = [sys.executable, "-m", "bench.ssd.engine", "--shape", shape]
            command += ["--runs", str(options.runs)]
            command += ["--stream-reads", str(options.stream_reads), "--minutes", f"{minutes:.2f}"]
            command += ["--json", str(file), "--tokens", *map(str, options.tokens)]
            for name in ("models", "store"):
                if given := getattr(options, name):
                    command += [f"--{name}", given]
            subprocess.run(command, check=False)  # the other shapes are measured anyway
            if file.exists():
                cases = json.loads(file.read_text())["cases"]
                table += [line(shape, case) for case in cases]
    print("\n".join(table), flush=True)


HEADING = (
    f"{'':16}{'tokens':>8}{'cold s':>9}{'ram':>8}{'disk':>8}{'uncached':>10}{'p99 read':>10}"
    f"{'and rest':>10}"
)


def line(shape: str, case: dict[str, Any]) -> str:
    """Return a table row: times relative to cold, and the delay of streams.

    The delay is that during a read, and during the read and the prefill of the prompt's rest.
    """
    head = f"{shape:16}{case['tokens']:8}{case['cold_s']:9.2f}"
    if "written" not in case:
        return f"{head}  not stored"
    shares = [case[name]["share_of_cold"] for name in ("ram", "disk", "disk, uncached")]
    read, both = (case["streams"][name] for name in ("ratio", "during_ratio"))
    return f"{head}{shares[0]:8.3f}{shares[1]:8.3f}{shares[2]:10.3f}{read:10.2f}{both:10.2f}"


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ssd.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="demo, or a model's folder")
    which.add_argument("--shape", nargs="+", help="shapes of random weights (bench.gpu)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 100_000])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--stream-reads", type=int, default=2, help="reads while seven streams decode"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="start no length after this")
    parser.add_argument("--models", help="folder for random weights, such as /dev/shm")
    parser.add_argument("--store", help="folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.shape and len(options.shape) > 1:
        run_shapes(options)
        return
    options.shape = options.shape[0] if options.shape else None
    with (
        tempfile.TemporaryDirectory(prefix="kvd-ssd-", dir=options.store) as store,
        open_model(
            options.model or options.shape, 2 * max(options.tokens), options.models
        ) as model,
    ):
        run(options, model, Path(store))


if __name__ == "__main__":
    main()
