r"""Measures matrix products of kvd's own CPU operations on one core, compared with its peak.

    python -m bench.native [--rows 1 8 64] [--sizes 256x768] [--against LIBRARY] [--json FILE]

Numbers are billions of multiplications per second of CPU time, in the thread that computes. The
peak is a loop of fused multiplications in registers (`bench/peak.c`). ``--against`` names another
build of the library (a path of ``kvd_native-*.so``): both multiply alternately, the ratio is the
median over the runs, and results that differ in any bit are an error.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx import nn

from kvd.worker.native import build
from kvd.worker.native.layers import PackedLinear

_PEAK = Path(__file__).with_name("peak.c")
_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_WORK = 60e6
"""Multiplications in one measurement, at least."""


class DifferentResultsError(RuntimeError):
    """Two libraries computed different numbers from the same input."""


def peak() -> float:
    """Return the most multiplications per second of one core, as the best of five runs."""
    wide = "avx512f" in build.processor()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peak.so"
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        flags.append(f"-DBYTES={64 if wide else 32}")
        command = [build.compiler() or "g++", "-x", "c", *flags, str(_PEAK), "-o", str(target)]
        subprocess.run(command, check=True)
        multiply = ctypes.CDLL(str(target)).multiply
        multiply.restype, multiply.argtypes = ctypes.c_double, [ctypes.c_long, ctypes.c_void_p]
        sink, found = (ctypes.c_float * 3)(0.5, 1.0, 0.0), []
        for _ in range(5):
            start = time.thread_time()
            done = multiply(1_000_000, sink)
            found.append(done / (time.thread_time() - start))
    return max(found)


def load(path: Path) -> ModuleType:
    """Load a build of the library."""
    spec = importlib.util.spec_from_file_location(build.NAME, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is no Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def once(layer: PackedLinear, library: ModuleType, x: mx.array) -> float:
    """Return multiplications per second of CPU time outside this thread, over many products."""
    inputs = x.shape[-1]
    work = x.shape[0] * inputs * layer.outputs
    results = [
        library.multiply(x, layer.packed, layer.outputs, None)
        for _ in range(max(4, int(_WORK / work)))
    ]
    start = time.process_time() - time.thread_time()
    mx.eval(results)
    return work * len(results) / (time.process_time() - time.thread_time() - start)


def measure(
    rows: int, outputs: int, inputs: int, dtype: str, libraries: list[ModuleType], runs: int
) -> dict[str, Any]:
    """Multiply with the libraries alternately."""
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = mx.random.normal((outputs, inputs)).astype(_DTYPES[dtype])
    layer = PackedLinear(libraries[0], linear)
    x = mx.random.normal((rows, inputs))
    mx.eval(layer.packed, x)
    wanted = [library.multiply(x, layer.packed, outputs, None) for library in libraries]
    if not all(mx.array_equal(one, wanted[0]) for one in wanted):
        raise DifferentResultsError(f"{rows} x {inputs} by {outputs}, {dtype}")
    speeds = [[once(layer, library, x) for library in libraries] for _ in range(runs)]
    found = {
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "dtype": dtype,
        "per_second": statistics.median(run[0] for run in speeds),
    }
    if len(libraries) > 1:
        found["ratio"] = statistics.median(run[0] / run[1] for run in speeds)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.native",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 64, 256])
    parser.add_argument("--sizes", nargs="+", default=["256x768", "768x256", "1024x3072"])
    parser.add_argument("--dtypes", nargs="+", default=["float16"], choices=sorted(_DTYPES))
    parser.add_argument("--against", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    libraries = [build.load(), *([load(options.against)] if options.against else [])]
    for library in libraries:
        library.use_threads(1)
    most, products = peak(), []
    print(f"peak: {most / 1e9:.0f} billion multiplications a second")
    for dtype in options.dtypes:
        for size in options.sizes:
            inputs, outputs = map(int, size.split("x"))
            for rows in options.rows:
                one = measure(rows, outputs, inputs, dtype, libraries, options.runs)
                one["of_peak"] = one["per_second"] / most
                products.append(one)
                ratio = f", {one['ratio']:.2f} of the other's" if "ratio" in one else ""
                print(
                    f"{rows:4d} x {inputs} by {outputs}, {dtype}: {one['per_second'] / 1e9:6.1f},"
                    f" {one['of_peak']:.0%} of the peak{ratio}"
                )
    if options.json:
        command = shlex.join(["python", "-m", "bench.native", *sys.argv[1:]])
        result = {"command": command, "peak_per_second": most, "products": products}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
