r"""Measures prefill attention of kvd's own CPU operations, compared with the peak of one core.

    python -m bench.native_attention [--contexts 1024 4096 12032] [--heads 64 128 256]
                                     [--against LIBRARY ...] [--json FILE]

A chunk attends to quantized pages and to itself, on one thread. A number is billions of
floating-point operations per second of CPU time in that thread, as the best of several runs:
four operations for each channel of each query and each key that it sees. The peak is that of
`bench.native`. ``--against`` names other builds of the library (`kvd_native-*.so`), which run in
alternation; results that differ in any bit are reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from bench.native import load, peak
from kvd.worker.native import build

PAGE = 64
GROUP = 64
_WORK = 2e9
"""Floating-point operations in one measurement, at least."""


@dataclass(frozen=True)
class Shape:
    """One chunk's attention; ``bits`` 16: pages are dense."""

    head: int
    repeats: int
    context: int
    """Tokens in pages, a multiple of 64."""
    chunk: int
    bits: int
    kv_heads: int = 2

    @property
    def operations(self) -> float:
        seen = self.chunk * self.context + self.chunk * (self.chunk + 1) / 2
        return 4 * self.head * self.kv_heads * self.repeats * seen

    def arguments(self) -> tuple[Any, ...]:
        """Return random arguments of `prefill_attention`."""
        pages = self.context // PAGE
        sides = [
            mx.random.normal((pages, self.kv_heads, self.head, PAGE)),
            mx.random.normal((pages, self.kv_heads, PAGE, self.head)),
        ]
        if self.bits != 16:
            sides = [one for side in sides for one in mx.quantize(side, GROUP, self.bits)]
        queries = mx.random.normal((1, self.kv_heads * self.repeats, self.chunk, self.head))
        own = [mx.random.normal((self.kv_heads, self.chunk, self.head)) for _ in range(2)]
        about = mx.array([[0, page, page * PAGE] for page in range(pages)], mx.int32)
        lows = mx.zeros((self.chunk,), mx.int32)
        mx.eval(sides, queries, own, about, lows)
        packing = [(self.bits, GROUP, False)]
        begin = pages * PAGE
        places = (self.head**-0.5, 0, None, pages, begin, begin)
        return (queries, about, *own, lows, sides, packing, packing, *places)


def measure(shape: Shape, libraries: list[ModuleType], runs: int) -> dict[str, Any]:
    """Attend with the libraries in alternation."""
    arguments = shape.arguments()
    times: list[list[float]] = [[] for _ in libraries]
    count = max(1, int(_WORK / shape.operations))
    outputs: list[mx.array] = []
    for _ in range(runs):
        outputs = []
        for number, library in enumerate(libraries):
            lazy = [library.prefill_attention(*arguments) for _ in range(count)]
            start = time.process_time() - time.thread_time()
            mx.eval(lazy)
            times[number].append((time.process_time() - time.thread_time() - start) / count)
            outputs.append(lazy[0])
    speeds = [shape.operations / min(one) / 1e9 for one in times]
    equal = all(mx.array_equal(one, outputs[0]).item() for one in outputs)
    return {**shape.__dict__, "gflops": speeds[0], "others": speeds[1:], "same_bits": equal}


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.native_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 12032])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--bits", type=int, nargs="+", default=[8])
    parser.add_argument("--against", type=Path, nargs="+", default=[])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    libraries = [build.load(), *(load(path) for path in options.against)]
    for library in libraries:
        library.use_threads(1)
    most, found = 2 * peak() / 1e9, []
    print(f"peak of one core: {most:.0f} GFLOP/s")
    choices = (options.heads, options.repeats, options.contexts, options.chunks, options.bits)
    for head, repeats, context, chunk, bits in itertools.product(*choices):
        shape = Shape(head, repeats, context, chunk, bits)
        one = measure(shape, libraries, options.runs)
        one["of_peak"] = one["gflops"] / most
        found.append(one)
        others = "".join(f", the other's {other:.1f}" for other in one["others"])
        print(
            f"head {head:3d}, {repeats} queries, {bits:2d} bits, {context:5d} + {chunk:4d} tokens:"
            f" {one['gflops']:6.1f}, {one['of_peak']:.0%} of the peak{others}"
            f"{'' if one['same_bits'] else ', other bits'}",
            flush=True,
        )
    if options.json:
        command = shlex.join(["python", "-m", "bench.native_attention", *sys.argv[1:]])
        result = {"command": command, "peak_gflops": most, "attention": found}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
