"""Compare the engine's decode loop with mlx-lm's `BatchGenerator` on this machine's device.

    python -m bench.gpu --shape qwen3-0.6b|qwen3-8b|demo|tiny [--rows 8] [--tokens 4096 16384]
                        [--kv k8v8 k4v4] [--attention fused reference] [--prefill 50000]
                        [--chunk 2048] [--steps 128] [--json FILE]

    python -m bench.gpu --shape qwen3-0.6b --folder DIR && python -m bench.serve --model DIR

The second line compares servers instead: kvd and `mlx_lm.server` on the same random weights.

For each length and scheme, the loops prefill random tokens and decode, one loop after the other.
kvd's loop decodes the same rows with each ``--attention``. *Host time* is the median time to build
and launch a step's graph while the device is idle, so that the launch waits for no earlier work.
*Outside attention* is the host time of a step without attention (`stub`). *Operations* are the
primitives of a step's graph except views (`graph`). The device may launch more or fewer kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from bench.bars import Bar
from bench.gpu import shapes
from bench.gpu.attentions import CHOSEN, FUSED, REFERENCE, Attentions, here
from bench.gpu.graph import computing
from bench.gpu.loops import WARM_UP, Loop, Ours, Steps, Theirs
from bench.gpu.stub import no_attention
from bench.retrace import retrace
from kvd.config.kv import parse_kv
from kvd.worker.cache.scheme import Scheme, schemes_of
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.device import on_cpu
from kvd.worker.gpu import joined_linear, products
from kvd.worker.serving import kernel_choice, probe, seam
from kvd.worker.serving.kernel_check import describe_verdict
from kvd.worker.serving.model_files import default_dtype
from kvd.worker.serving.runner import Runner

HOST_LIMIT_MS = 4.0
"""Limit of a step's host time outside attention."""
STEP_HOST_LIMIT_MS = 3.0
"""Limit of a whole step's host time with fused attention, scaled to `STEP_LAYERS` layers."""
STEP_LAYERS = 28
SPEED_LIMIT = 3.0
"""Smallest ratio of fused attention's tokens per second to BatchGenerator's."""
PREFILL_LIMIT = 1.15


class Bench:
    """One model, with both loops over it."""

    def __init__(self, options: argparse.Namespace) -> None:
        seam.install()
        self._options = options
        self._dtype = default_dtype() or mx.bfloat16
        self._model = shapes.build(options.shape, self._dtype)
        ours = shapes.build(options.shape, self._dtype)
        self._product: products.Product | None = None
        if not on_cpu():  # as when the engine loads a model
            self._product = products.find(self._dtype)
            joined_linear.join(ours, self._product)
            mx.eval(joined_linear.joined_arrays(ours))
        self._ours = ours
        self.weights_bytes = mx.get_active_memory()
        self._vocabulary: int = shapes.SHAPES[options.shape]["vocab_size"]
        self._served: dict[str, tuple[Runner, Attentions]] = {}
        self.paths: dict[str, str] = {}
        """Description of how each scheme is served, as chosen by the probe."""

    def _serve(self, kv: str) -> tuple[Runner, Attentions]:
        """Return kvd's runner over pages of a scheme; the first call probes it."""
        if kv not in self._served:
            served = self._probed(self._settings(kv))
            shared = "rows share a pass" if served.runner.cache.batched else "one row a pass"
            how = "compiled steps" if served.runner.compile() else "plain steps"
            fused = "" if served.fused is None else f"; {describe_verdict(served.fused)}"
            self.paths[kv] = f"{served.path}, {shared}, {how}{fused}"
            self._served[kv] = served.runner, Attentions(served.runner)
            mx.clear_cache()
            gc.collect()  # as the engine does after a load
            gc.freeze()
        return self._served[kv]

    def _settings(self, kv: str) -> CacheSettings:
        """Return the settings of ``k4v4``, or of ``k4v4:k3v3-k8v5``: bits by layer, repeated."""
        name, _, pattern = kv.partition(":")
        schemes = tuple(schemes_of(parse_kv(name)))
        if not pattern:
            return CacheSettings(schemes=schemes)
        cycle = itertools.cycle([Scheme.parse(one) for one in pattern.split("-")])
        mix = tuple(itertools.islice(cycle, len(self._ours.layers)))
        return CacheSettings(schemes=schemes, mixes=(mix,))

    def _probed(self, settings: CacheSettings) -> probe.Served:
        """Choose how to serve a scheme, as the engine does."""
        backend = kernel_choice.find_kernels()
        if backend is None:
            return probe.serve(self._ours, settings, self._vocabulary)
        own = self._product is not None
        return kernel_choice.serve(self._ours, settings, self._vocabulary, backend, products=own)

    def ours(self, kv: str) -> Ours:
        """Return kvd's loop without rows."""
        return Ours(self._serve(kv)[0], self._vocabulary, self._options.chunk)

    def theirs(self) -> Theirs:
        """Return mlx-lm's loop without rows."""
        return Theirs(self._model, longest=8 * (self._options.steps + WARM_UP))

    def decode_ours(self, kv: str, tokens: int) -> Iterator[dict[str, Any]]:
        """Prefill rows of ``tokens`` tokens, then decode them with each attention in turn."""
        _, attentions = self._serve(kv)
        with contextlib.closing(self.ours(kv)) as loop:
            filled = self._fill(loop, tokens)
            try:
                for name in self._options.attention:
                    attentions.use(name)
                    which = {"attention": name, "kv": kv}
                    yield filled | which | self._decode(loop, tokens, kv)
            finally:
                attentions.use(CHOSEN)

    def decode_theirs(self, tokens: int) -> Iterator[dict[str, Any]]:
        """Prefill rows of ``tokens`` tokens and decode them with mlx-lm's loop."""
        with contextlib.closing(self.theirs()) as loop:
            filled = self._fill(loop, tokens)
            yield filled | self._decode(loop, tokens, None)

    def _fill(self, loop: Loop, tokens: int) -> dict[str, Any]:
        options = self._options
        prompts = [shapes.tokens(options.shape, tokens, row) for row in range(options.rows)]
        fill_s, fill_peak = _peak(lambda: loop.fill(prompts))
        return {"loop": loop.name, "fill_s": fill_s, "fill_peak_bytes": fill_peak}

    def _decode(self, loop: Loop, tokens: int, kv: str | None) -> dict[str, Any]:
        options = self._options
        loop.decode(WARM_UP)
        found: dict[str, Any] = {}
        cpu = time.process_time()
        _, peak = _peak(lambda: found.update(steps=loop.decode(options.steps)))
        cpu = time.process_time() - cpu
        steps: Steps = found["steps"]
        result = {
            "rows": options.rows,
            "tokens": tokens,
            "tok_s": options.rows * len(steps.wall) / sum(steps.wall),
            "step_ms": _median_ms(steps.wall),
            "slowest_ms": 1e3 * max(steps.wall),
            "cpu_ms_per_token": 1e3 * cpu / (options.rows * options.steps),
            "flushes": steps.flushes,
            "kv_bytes": loop.kv_bytes,
            "peak_bytes": peak,
            "peak_over_weights": peak - self.weights_bytes,
        }
        if isinstance(loop, Ours):
            result |= _host("host", loop.decode_idle(options.steps // 2))
            counts = loop.count()
            result |= {"operations": computing(counts), "primitives": dict(counts.most_common())}
        with no_attention():
            self._retrace(kv)
            loop.decode(WARM_UP)
            result["step_without_attention_ms"] = _median_ms(loop.decode(options.steps // 2).wall)
            if isinstance(loop, Ours):
                idle = loop.decode_idle(options.steps // 2)
                result |= _host("host_without_attention", idle)
        self._retrace(kv)
        return result

    def _retrace(self, kv: str | None) -> None:
        if kv is not None:
            retrace(self._serve(kv)[0])

    def prefill(self, make: Callable[[], Loop], tokens: int) -> dict[str, Any]:
        """Prefill one prompt, including its first new token."""
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
    """Do the work; return its seconds and the peak bytes of MLX's allocator."""
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
    """Run all measurements; return the contents of the JSON file."""
    start = time.perf_counter()
    bench = Bench(options)
    ours = options.kv if options.only != "mlx-lm" else []
    sides: list[Callable[[], Loop]] = [partial(bench.ours, kv) for kv in ours]
    if options.only != "kvd":
        sides.append(bench.theirs)
    # Not timed: the first pass over a shape compiles kernels.
    for make in sides:
        bench.prefill(make, 2 * options.chunk)
    console.print(
        f"{options.shape}: weights {bench.weights_bytes / 1e9:.2f} GB, {bench.paths}, ready after"
        f" {time.perf_counter() - start:.0f} s",
        highlight=False,
    )
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]]),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": "cpu" if on_cpu() else str(mx.device_info().get("device_name", "gpu")),
        "shape": options.shape,
        "layers": shapes.SHAPES[options.shape]["num_hidden_layers"],
        "kv": options.kv,
        "chunk": options.chunk,
        "attention_paths": bench.paths,
        "weights_bytes": bench.weights_bytes,
        "ready_s": time.perf_counter() - start,
        "decode": [],
        "prefill": [],
        "failed": [],
    }

    record = _Record(result, options.json, console, start)
    for tokens in options.tokens:
        for kv in ours:
            record.note("decode", f"ours {kv}, {tokens} tokens", bench.decode_ours(kv, tokens))
        if options.only != "kvd":
            record.note("decode", f"theirs, {tokens} tokens", bench.decode_theirs(tokens))
    for run_number in range(options.runs if options.prefill else 0):
        for make in sides if run_number % 2 == 0 else sides[::-1]:
            row = (bench.prefill(make, options.prefill) for _ in range(1))
            record.note("prefill", f"{options.prefill} tokens", row)
    return result


class _Record:
    """Prints and saves each measurement at once, so that an interrupted run keeps its results."""

    def __init__(
        self, result: dict[str, Any], file: Path | None, console: Console, start: float
    ) -> None:
        self._result = result
        self._file = file
        self._console = console
        self._start = start

    def note(self, part: str, what: str, rows: Iterator[dict[str, Any]]) -> None:
        """Record the measurements that ``rows`` yields, and the error if one fails."""
        try:
            for row in rows:
                self._result[part].append(row)
                values = ", ".join(f"{name} {row[name]:.6g}" for name in _PRINTED[part])
                self._console.print(f"  {part} {_name(row)}, {what}: {values}", highlight=False)
                self._save()
        except (RuntimeError, MemoryError) as error:  # such as a full device
            values = f"{type(error).__name__}: {str(error).strip()[:200]}"
            self._result["failed"].append(f"{part} {what}: {values}")
            self._console.print(f"  {part} {what}: {values}", highlight=False)
            mx.clear_cache()
        self._save()

    def _save(self) -> None:
        self._result["seconds"] = time.perf_counter() - self._start
        self._result["bars"] = [bar.as_dict() for bar in verdicts(self._result)]
        if self._file:
            self._file.write_text(json.dumps(self._result, indent=2) + "\n")


def _name(row: dict[str, Any]) -> str:
    """Return the loop's name, followed by its attention if it has a choice."""
    return " ".join([row["loop"], *([row["attention"]] if "attention" in row else [])])


_PRINTED = {
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
    """Print the tables, and for each limit whether it is met."""
    table = Table(title=f"decode, {result['shape']} on {result['device']}")
    for name in _DECODE_COLUMNS:
        table.add_column(name)
    for row in result["decode"]:
        cells = row | {"loop": _name(row)}
        table.add_row(*(_cell(name, cells.get(name)) for name in _DECODE_COLUMNS))
    console.print(table)
    table = Table(title="prefill of one prompt")
    for name in _PREFILL_COLUMNS:
        table.add_column(name)
    for row in result["prefill"]:
        table.add_row(*(_cell(name, row.get(name)) for name in _PREFILL_COLUMNS))
    if result["prefill"]:
        console.print(table)
    for bar in verdicts(result):
        console.print(str(bar), highlight=False)


_DECODE_COLUMNS = (
    "loop", "tokens", "tok_s", "step_ms", "slowest_ms", "cpu_ms_per_token",
    "step_without_attention_ms", "host_ms", "host_without_attention_ms", "operations", "kv_bytes",
    "peak_over_weights", "fill_s", "fill_peak_bytes",
)  # fmt: skip
_PREFILL_COLUMNS = ("loop", "tokens", "seconds", "tok_s", "peak_over_weights")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("bytes") or name == "peak_over_weights":
        return f"{value / 1e9:.3f} GB"
    return value if isinstance(value, str) else f"{value:,.4g}"


def verdicts(result: dict[str, Any]) -> list[Bar]:
    """Return all limits with their values."""
    bars = []
    on_gpu = result["device"] != "cpu"  # on the CPU, host time includes the computation
    outside = [row["host_without_attention_ms"] for row in _ours(result)]
    if outside and on_gpu:
        what = "host time per step outside attention, ms"
        bars.append(Bar(what, max(outside), HOST_LIMIT_MS))
    fused = [row for row in _ours(result) if row["attention"] == FUSED]
    if fused and on_gpu:
        host = max(row["host_ms"] for row in fused) * STEP_LAYERS / result["layers"]
        what = f"host time of a step, fused attention, ms at {STEP_LAYERS} layers"
        bars.append(Bar(what, host, STEP_HOST_LIMIT_MS))
    bars += [
        Bar(f"{_name(row)}, {row['tokens']} tokens: tok/s / BatchGenerator's", ratio,
            SPEED_LIMIT, at_least=True)
        for row in fused if (ratio := _speed(result, row)) is not None
    ]  # fmt: skip
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
        bars.append(Bar(f"prefill time, {loop} / BatchGenerator", time_ratio, PREFILL_LIMIT))
        peak_ratio = ours["peak_bytes"] / theirs["peak_bytes"]
        bars.append(Bar(f"prefill peak, {loop} / BatchGenerator", peak_ratio, 1.0))
    return bars


def _ours(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["decode"] if row["loop"] != Theirs.name]


def _speed(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return a row's tok/s divided by BatchGenerator's at this length; None if that is missing."""
    for other in result["decode"]:
        if (other["loop"], other["tokens"]) == (Theirs.name, row["tokens"]):
            return float(row["tok_s"] / other["tok_s"])
    return None


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
    parser.add_argument("--runs", type=int, default=2, help="repeats of the long prefill")
    parser.add_argument(
        "--kv",
        nargs="+",
        default=["k8v8", "k4v4"],
        help="schemes of kvd's pages; k4v4:k3v3-k8v5: bits by layer, repeated",
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=[CHOSEN, FUSED, REFERENCE],
        default=here(),
        help=f"attention of kvd's decode steps; {CHOSEN}: as the engine would choose at load",
    )
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of kvd's prefill chunks")
    parser.add_argument("--steps", type=int, default=128, help="decode steps (a flush every 64)")
    parser.add_argument("--only", choices=["kvd", "mlx-lm"], help="run only one of the loops")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="write the model here; measure nothing")
    options = parser.parse_args(arguments)
    if options.folder is not None:
        shapes.write(options.shape, mx.bfloat16, options.folder)
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    show(measure(options, console), console)


if __name__ == "__main__":
    main()
