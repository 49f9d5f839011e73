"""Run the comparison on this machine's device.

    python -m bench.gpu --shape qwen3-0.6b|qwen3-8b|demo|tiny [--rows 8] [--tokens 4096 16384]
                        [--prefill 50000] [--kv k8v8] [--chunk 2048] [--steps 64] [--json FILE]

    python -m bench.gpu --shape qwen3-0.6b --folder DIR && python -m bench.serve --model DIR

The second form is for servers: kvd beside `mlx_lm.server` on the same random weights.

For each length both loops fill their rows by real prefill of random tokens and decode, in turn.
Then both decode with attention replaced by a single op (`stub`): what a step then takes on the
host, building the graph and launching it, is the *host time per step outside attention*. It is
taken with an idle device before each step, so that nothing waits for earlier work; the median
counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from bench.gpu import shapes
from bench.gpu.loops import WARM_UP, Loop, Ours, Steps, Theirs
from bench.gpu.stub import no_attention
from kvd.kv import parse_kv
from kvd.worker import probe, products, seam, siblings
from kvd.worker.cache.composite import CacheSettings
from kvd.worker.cache.scheme import ladder_of
from kvd.worker.model import default_dtype
from kvd.worker.runner import on_cpu

HOST_LIMIT_MS = 4.0
PREFILL_LIMIT = 1.15


class Bench:
    """One model, and both loops over it."""

    def __init__(self, options: argparse.Namespace) -> None:
        seam.install()
        self._options = options
        self._dtype = default_dtype() or mx.bfloat16
        self._model = shapes.build(options.shape, self._dtype)
        ours = shapes.build(options.shape, self._dtype)
        if not on_cpu():  # as the engine loads it
            siblings.join(ours, products.find(self._dtype))
            mx.eval(siblings.joined_arrays(ours))
        self.weights_bytes = mx.get_active_memory()
        ladder = tuple(ladder_of(parse_kv(options.kv)))
        self._vocabulary: int = shapes.SHAPES[options.shape]["vocab_size"]
        served = probe.serve(ours, CacheSettings(ladder=ladder), self._vocabulary)
        self._runner = served.runner
        shared = "rows share a pass" if served.runner.cache.batched else "one row a pass"
        how = "compiled steps" if served.runner.compile() else "plain steps"
        self.path = f"{served.path}, {shared}, {how}"
        mx.clear_cache()
        gc.collect()  # as the engine does after a load
        gc.freeze()

    def ours(self) -> Ours:
        """Return our loop without rows."""
        return Ours(self._runner, self._vocabulary, self._options.chunk)

    def theirs(self) -> Theirs:
        """Return mlx-lm's without rows."""
        return Theirs(self._model, longest=8 * (self._options.steps + WARM_UP))

    def decode(self, make: Callable[[], Loop], tokens: int) -> dict[str, Any]:
        """Fill rows of so many tokens and decode."""
        with contextlib.closing(make()) as loop:
            return self._decode(loop, tokens)

    def _decode(self, loop: Loop, tokens: int) -> dict[str, Any]:
        options = self._options
        prompts = [shapes.tokens(options.shape, tokens, row) for row in range(options.rows)]
        fill_s, fill_peak = _peak(lambda: loop.fill(prompts))
        loop.decode(WARM_UP)
        found: dict[str, Any] = {}
        cpu = time.process_time()
        _, peak = _peak(lambda: found.update(steps=loop.decode(options.steps)))
        cpu = time.process_time() - cpu
        steps: Steps = found["steps"]
        result = {
            "loop": loop.name,
            "rows": options.rows,
            "tokens": tokens,
            "tok_s": options.rows * len(steps.wall) / sum(steps.wall),
            "step_ms": _median_ms(steps.wall),
            "cpu_ms_per_token": 1e3 * cpu / (options.rows * options.steps),
            "flushes": steps.flushes,
            "kv_bytes": loop.kv_bytes,
            "peak_bytes": peak,
            "peak_over_weights": peak - self.weights_bytes,
            "fill_s": fill_s,
            "fill_peak_bytes": fill_peak,
        }
        if isinstance(loop, Ours):
            result |= _host("host", loop.decode_idle(options.steps))
        with no_attention():
            self._runner.retrace()
            loop.decode(WARM_UP)
            stubbed = loop.decode(options.steps)
            result["step_without_attention_ms"] = _median_ms(stubbed.wall)
            if isinstance(loop, Ours):
                result |= _host("host_without_attention", loop.decode_idle(options.steps))
        self._runner.retrace()
        return result

    def prefill(self, make: Callable[[], Loop], tokens: int) -> dict[str, Any]:
        """Prefill one prompt, up to its first token."""
        prompt = shapes.tokens(self._options.shape, tokens, 0)
        with contextlib.closing(make()) as loop:
            seconds, peak = _peak(lambda: loop.fill([prompt]))
        return {
            "loop": loop.name,
            "tokens": tokens,
            "seconds": seconds,
            "tok_s": tokens / seconds,
            "peak_bytes": peak,
            "peak_over_weights": peak - self.weights_bytes,
        }


def _peak(work: Callable[[], object]) -> tuple[float, int]:
    """Do the work; return its seconds and the most that MLX's allocator had in use."""
    mx.synchronize()
    mx.reset_peak_memory()
    start = time.perf_counter()
    work()
    mx.synchronize()
    return time.perf_counter() - start, mx.get_peak_memory()


def _host(name: str, steps: Steps) -> dict[str, float]:
    both = [a + b for a, b in zip(steps.build, steps.launch, strict=True)]
    return {
        f"{name}_ms": _median_ms(both),
        f"{name}_build_ms": _median_ms(steps.build),
        f"{name}_launch_ms": _median_ms(steps.launch),
        f"{name}_cpu_ms": _median_ms(steps.cpu),
    }


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything; return what is written as JSON."""
    start = time.perf_counter()
    bench = Bench(options)
    console.print(
        f"{options.shape}: weights {bench.weights_bytes / 1e9:.2f} GB, {bench.path}, ready after"
        f" {time.perf_counter() - start:.0f} s",
        highlight=False,
    )
    sides: list[Callable[[], Loop]] = [bench.ours, bench.theirs]
    if options.only:
        sides = [bench.ours if options.only == "kvd" else bench.theirs]
    # The first pass over a shape compiles kernels: that is nobody's speed.
    for make in sides:
        bench.prefill(make, 2 * options.chunk)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]]),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": "cpu" if on_cpu() else str(mx.device_info().get("device_name", "gpu")),
        "shape": options.shape,
        "kv": options.kv,
        "chunk": options.chunk,
        "attention_path": bench.path,
        "weights_bytes": bench.weights_bytes,
        "decode": [],
        "prefill": [],
        "failed": [],
    }

    def note(part: str, work: Callable[..., dict[str, Any]], make: Any, tokens: int) -> None:
        """Measure, say and save at once: a run that is cut off has said something."""
        try:
            row = work(make, tokens)
            result[part].append(row)
            values = ", ".join(f"{name} {row[name]:.6g}" for name in _SAID[part])
        except (RuntimeError, MemoryError) as error:  # such as: the device is full
            values = f"{type(error).__name__}: {str(error).strip()[:200]}"
            result["failed"].append(f"{part} {make.__name__} {tokens}: {values}")
            mx.clear_cache()
        console.print(f"  {part} {make.__name__}, {tokens} tokens: {values}", highlight=False)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")

    for tokens in options.tokens:
        for make in sides:
            note("decode", bench.decode, make, tokens)
    for turn in range(options.runs if options.prefill else 0):
        for make in sides if turn % 2 == 0 else sides[::-1]:
            note("prefill", bench.prefill, make, options.prefill)
    return result


_SAID = {
    "decode": ("tok_s", "step_ms", "step_without_attention_ms", "peak_over_weights"),
    "prefill": ("seconds", "peak_over_weights"),
}
_PACKAGES = ("mlx", "mlx-cuda-13", "mlx-lm")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables, and the two limits that hold on this script's numbers."""
    table = Table(title=f"decode, {result['shape']} on {result['device']}")
    for name in _DECODE_COLUMNS:
        table.add_column(name)
    for row in result["decode"]:
        table.add_row(*(_cell(name, row.get(name)) for name in _DECODE_COLUMNS))
    console.print(table)
    table = Table(title="prefill of one prompt")
    for name in _PREFILL_COLUMNS:
        table.add_column(name)
    for row in result["prefill"]:
        table.add_row(*(_cell(name, row.get(name)) for name in _PREFILL_COLUMNS))
    if result["prefill"]:
        console.print(table)
    for line in verdicts(result):
        console.print(line, highlight=False)


_DECODE_COLUMNS = (
    "loop", "rows", "tokens", "tok_s", "step_ms", "cpu_ms_per_token", "step_without_attention_ms",
    "host_ms", "host_without_attention_ms", "kv_bytes", "peak_over_weights", "fill_s",
    "fill_peak_bytes",
)  # fmt: skip
_PREFILL_COLUMNS = ("loop", "tokens", "seconds", "tok_s", "peak_over_weights")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("bytes") or name == "peak_over_weights":
        return f"{value / 1e9:.3f} GB"
    return value if isinstance(value, str) else f"{value:,.4g}"


def verdicts(result: dict[str, Any]) -> list[str]:
    """Return what holds and what does not, a line each."""
    lines = []
    hosts = [
        row["host_without_attention_ms"]
        for row in result["decode"]
        if "host_without_attention_ms" in row
    ]
    if hosts and result["device"] != "cpu":  # there a launch computes
        lines.append(
            _verdict("host time per step outside attention, ms", max(hosts), HOST_LIMIT_MS)
        )
    medians = {
        loop: {
            name: statistics.median(row[name] for row in result["prefill"] if row["loop"] == loop)
            for name in ("seconds", "peak_bytes")
        }
        for loop in {row["loop"] for row in result["prefill"]}
    }
    theirs = medians.pop(Theirs.name, None)
    for loop, ours in medians.items() if theirs else ():
        assert theirs is not None
        time_ratio = ours["seconds"] / theirs["seconds"]
        lines.append(_verdict(f"prefill time, {loop} / BatchGenerator", time_ratio, PREFILL_LIMIT))
        peak_ratio = ours["peak_bytes"] / theirs["peak_bytes"]
        lines.append(_verdict(f"prefill peak, {loop} / BatchGenerator", peak_ratio, 1.0))
    return lines


def _verdict(what: str, value: float, limit: float) -> str:
    return f"{what}: {value:.3f}, at most {limit:g}: {'pass' if value <= limit else 'MISS'}"


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=list(shapes.SHAPES), required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--prefill", type=int, default=0, help="tokens of one long prompt")
    parser.add_argument("--runs", type=int, default=2, help="of the long prefill")
    parser.add_argument("--kv", default="k8v8", help="scheme of our pages")
    parser.add_argument("--chunk", type=int, default=2048, help="our prefill chunk")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--only", choices=["kvd", "mlx-lm"], help="one of the two loops")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="write the model there and measure nothing")
    options = parser.parse_args(arguments)
    if options.folder is not None:
        shapes.write(options.shape, default_dtype() or mx.bfloat16, options.folder)
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    show(measure(options, console), console)


if __name__ == "__main__":
    main()
