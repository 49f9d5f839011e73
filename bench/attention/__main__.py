r"""Time decode attention on this machine's GPU, and compare the times with fixed limits.

    python -m bench.attention [--parts bars length gqa dim bits] [--json FILE] [--plot FILE.svg]
    python -m bench.attention --path reference --small     # on any machine: shows that it runs

A path is one way to compute attention. One evaluation holds 20 calls of a path, or fewer if it is
slow. Each call has its own queries, evaluated before the clock starts, and keeps its result. A
measurement is four evaluations in a row, and numbers are medians of seven measurements. In the
column *serial*, each call's queries are the previous call's result, as in a model's layers. Calls
cycle through several layers if one layer would stay in the GPU's cache; ``*`` marks a path whose
layers fit into the cache even so. Calls over pages read the pages and the dense tail (64 tokens and
the newest one), and the reported bytes are exactly those. A result whose error exceeds its bound is
reported without a time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from bench.attention import draw, paths
from bench.attention.bars import bars
from bench.attention.case import Case, Shape
from bench.attention.plans import PARTS
from bench.attention.timing import Timed, copy_bandwidth, measure
from bench.attention.truth import WrongResultError
from kvd.worker.cache.scheme import Scheme

SMALL = 256
"""Divisor of the lengths with ``--small``."""
REFERENCE_MOST = 32768 * 8
"""Keys in all rows together above which the reference is not timed, because it takes too long."""


class NoAcceleratorError(RuntimeError):
    """The fused kernels and the limits need a GPU, and this machine has none."""


class Bench:
    """Measures paths one after the other and writes the results so far to disk."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self._wanted = options.path or ["fused", "reference", "dense", "masked"]
        self._dtype = mx.float32 if on_cpu() else mx.bfloat16
        self._copy = copy_bandwidth(1 << 20) if on_cpu() else copy_bandwidth()
        self.result: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "bench.attention", *sys.argv[1:]]),
            "versions": {name: _version(name) for name in ("mlx", "mlx-cuda-13")},
            "device": "cpu" if on_cpu() else str(mx.device_info().get("device_name", "gpu")),
            "dtype": str(self._dtype).removeprefix("mlx.core."),
            "copy_bytes_per_s": self._copy,
            "measured": [],
            "failed": [],
        }

    def run(self) -> dict[str, Any]:
        """Measure the requested parts."""
        start = time.perf_counter()
        for part in self._options.parts:
            for shape, schemes, names in PARTS[part]():
                self._compare(part, self._sized(shape), schemes, names)
        self.result["seconds"] = time.perf_counter() - start
        self.result["compiling_s"] = sum(row["first_s"] for row in self.result["measured"])
        self.result["bars"] = [bar.as_dict() for bar in bars(self.result["measured"])]
        self._write()
        return self.result

    def _sized(self, shape: Shape) -> Shape:
        if not self._options.small:
            return shape
        lengths = tuple(max(64, length // SMALL // 64 * 64) for length in shape.lengths)
        return Shape(lengths, shape.q_heads, shape.kv_heads, shape.dim)

    def _compare(
        self, part: str, shape: Shape, schemes: tuple[Scheme, ...], names: tuple[str, ...]
    ) -> None:
        wanted = [name for name in names if name in self._wanted]
        if "native" in self._wanted:
            wanted.append("native")
        for scheme in schemes:
            if self._options.schemes and scheme.name not in self._options.schemes:
                continue
            over = [name for name in wanted if name in _OVER_PAGES]
            if sum(shape.lengths) > REFERENCE_MOST:
                over = [name for name in over if name != "reference"]
            if over:
                self._try(part, shape, partial(self._pages, part, shape, scheme, over))
        for name in ("dense", "masked"):
            if name in wanted:
                self._try(part, shape, partial(self._dense, part, shape, name))

    def _pages(self, part: str, shape: Shape, scheme: Scheme, names: list[str]) -> None:
        case = Case(shape, scheme, self._dtype)
        for name in names:
            self._try(part, shape, partial(self._over_pages, part, case, name))

    def _over_pages(self, part: str, case: Case, name: str) -> None:
        self._one(part, case.shape, _OVER_PAGES[name](case), case.scheme)

    def _dense(self, part: str, shape: Shape, name: str) -> None:
        path = paths.dense(shape, self._dtype, masked=name == "masked")
        self._one(part, shape, path, None)

    def _try(self, part: str, shape: Shape, work: Callable[[], None]) -> None:
        """Run ``work``; record an error instead of raising it, so that the next path still runs."""
        try:
            work()
        except (RuntimeError, ValueError, MemoryError, ImportError, WrongResultError) as error:
            what = f"{part}, {shape.name}: {type(error).__name__}: {str(error)[:300]}"
            self.result["failed"].append(what)
            self._console.print(f"failed: {what}", style="red", highlight=False)
            if not isinstance(error, WrongResultError):
                traceback.print_exc()
        mx.clear_cache()
        self._write()

    def _one(self, part: str, shape: Shape, path: paths.Path, scheme: Scheme | None) -> None:
        got = path.call(0, path.queries[0])
        start = time.perf_counter()
        mx.eval(got)
        first_s = time.perf_counter() - start
        error = path.error(got)
        if not error <= path.bound:
            raise WrongResultError(
                f"{path.name} is off by {error:.2g}, more than the allowed {path.bound:g}"
            )
        timed = measure(path.call, path.queries)
        row = self._row(part, shape, path, timed)
        about = {"scheme": scheme and scheme.name, "error": error, "first_s": first_s}
        self.result["measured"].append(row | about)

    def _row(self, part: str, shape: Shape, path: paths.Path, timed: Timed) -> dict[str, Any]:
        rate = path.nbytes / (timed.ms / 1e3)
        return {
            "part": part,
            "shape": shape.name,
            "lengths": list(shape.lengths),
            "q_heads": shape.q_heads,
            "kv_heads": shape.kv_heads,
            "dim": shape.dim,
            "path": path.name,
            "ms": timed.ms,
            "serial_ms": timed.serial_ms,
            "calls": timed.calls,
            "nbytes": path.nbytes,
            "bytes_per_s": rate,
            "of_copy": rate / self._copy,
            "is_cold": path.is_cold,
        }

    def _write(self) -> None:
        if self._options.json:
            self._options.json.write_text(json.dumps(self.result, indent=2) + "\n")


_OVER_PAGES: dict[str, Callable[[Case], paths.Path]] = {
    "fused": paths.fused,
    "reference": paths.reference,
    "native": paths.native,
}


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU here."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def show(result: dict[str, Any], console: Console) -> None:
    """Print a table for each part, and the limits."""
    for part in PARTS:
        rows = [row for row in result["measured"] if row["part"] == part]
        if rows:
            console.print(_table(part, rows))
    for bar in bars(result["measured"]):
        console.print(str(bar), highlight=False)
    console.print(
        f"copy bandwidth {result['copy_bytes_per_s'] / 1e12:.2f} TB/s; the run took"
        f" {result['seconds']:.0f} s, {result['compiling_s']:.1f} s of it in first calls",
        highlight=False,
    )


def _table(part: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=part)
    for name in (
        "shape",
        "path",
        "ms",
        "serial ms",
        "TB/s",
        "of copy bandwidth",
        "MB",
        "error",
        "first s",
    ):
        table.add_column(name, justify="left" if name in ("shape", "path") else "right")
    last = None
    for row in rows:
        table.add_row(
            "" if row["shape"] == last else row["shape"],
            row["path"] + ("" if row["is_cold"] else " *"),
            f"{row['ms']:.4f}",
            f"{row['serial_ms']:.4f}",
            f"{row['bytes_per_s'] / 1e12:.2f}",
            f"{row['of_copy']:.0%}",
            f"{row['nbytes'] / 1e6:,.1f}",
            f"{row['error']:.1e}",
            f"{row['first_s']:.2f}",
        )
        last = row["shape"]
    return table


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--path", nargs="+", choices=["fused", "reference", "native", "dense", "masked"]
    )
    parser.add_argument("--schemes", nargs="+", help="measure only these, such as k4v4")
    parser.add_argument("--small", action="store_true", help="short rows, only to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    if on_cpu() and (not options.path or not options.small or "fused" in options.path):
        raise NoAcceleratorError(
            "MLX computes on the CPU here, but the fused kernels and the limits are for GPUs. To"
            " try the benchmark on a CPU, name paths that run there and add --small:"
            " python -m bench.attention --path reference native dense --small"
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    result = Bench(options, console).run()
    show(result, console)
    if options.plot:
        draw.draw(result, options.plot)


if __name__ == "__main__":
    try:
        main()
    except NoAcceleratorError as error:
        sys.exit(f"bench.attention: {error}")
