r"""Measures decode steps of an engine with the same bits in all layers and with bits by layer.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_THREAD_TIMEOUT=12 \
    python -m bench.decode_bits [--model demo] [--kv k4v4 k4v4:auto k5v3] [--rows 8]
                                [--prompts 1024 4096 8192] [--rounds 5] [--json FILE]

The engines run in this process (`bench.timeline`), one for each scheme, in alternation, because a
machine's speed changes over time. A step counts if it prefills nothing and delivers a token to
every row. The speed of a scheme is relative to the first one: the median over rounds, and the
least and the greatest. With `:auto` after a scheme, the layers have the
bits of the calibration in ``KVD_CALIBRATION`` (`kvctl calibrate`); without one, all have the same.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

from bench.timeline import Timeline
from protocol.kv import BitsMode


def _timeline(model: str, text: str) -> Timeline:
    kv = text.removesuffix(":auto")
    bits: BitsMode = "off" if kv == text else "auto"
    return Timeline(model, kv, 64, whole_passes=True, bits_by_layer=bits)


def step_ms(timeline: Timeline, rows: int, prompt: int, seed: int) -> float:
    """Return the median milliseconds of the steps that only decode."""
    timeline.play(rows, prompt, 300 + prompt // 16, seed)
    found = [
        step.end - step.begin
        for step in timeline.steps
        if not step.prefilled and step.delivered == rows
    ]
    return statistics.median(found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return each scheme's times and speeds at each length."""
    timelines = {kv: _timeline(options.model, kv) for kv in options.kv}
    lengths = []
    for prompt in options.prompts:
        times: dict[str, list[float]] = {kv: [] for kv in timelines}
        for round_ in range(options.rounds):
            for kv, timeline in timelines.items():
                times[kv].append(step_ms(timeline, options.rows, prompt, round_))
        first = times[options.kv[0]]
        lengths.append({
            "prompt": prompt,
            "ms": times,
            "speeds": {
                kv: [a / b for a, b in zip(first, some, strict=True)]
                for kv, some in times.items()
            },
        })  # fmt: skip
        for kv, speeds in lengths[-1]["speeds"].items():
            print(
                f"{prompt:6} tokens  {kv:40} {statistics.median(times[kv]):7.2f} ms  speed"
                f" {statistics.median(speeds):.3f} ({min(speeds):.3f} to {max(speeds):.3f})",
                flush=True,
            )
    return {
        "command": shlex.join(["python", "-m", "bench.decode_bits", *sys.argv[1:]]),
        "rows": options.rows,
        "bits": {kv: to_builtins(one.info.kv_bits) for kv, one in timelines.items()},
        "mixes": {kv: one.info.kv_mixes for kv, one in timelines.items()},
        "lengths": lengths,
    }


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument("--kv", nargs="+", default=["k4v4", "k4v4:auto", "k5v3"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
