r"""Measures where a decode step's time goes on the CPU: the time saved if one part costs nothing.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_THREAD_TIMEOUT=12 \
    python -m bench.step [--rows 8] [--tokens 300] [--kv k8v8] [--json FILE] [--plot FILE]

The embedded model decodes in compiled steps, with kvd's own operations and with MLX's. One part
after the other is replaced by operations that cost almost nothing. The difference in step time is
the part's time, including MLX's time to launch it. Building a step's graph on the host and drawing
tokens are timed directly. *The rest* is the remaining time: residual sums, the embedding, and MLX's
walk over the graph. A server runs each layer as one operation, which has no parts. Such steps are
compared with steps of many operations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx import nn
from mlx_lm.models import activations

from bench.retrace import retrace
from kvd import demo
from kvd.config.kv import parse_kv
from kvd.worker import decoder_layers
from kvd.worker.cache.scheme import schemes_of
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.steps import DecodeStep
from kvd.worker.native import activation, build, operations, whole_layers
from kvd.worker.native.layers import PackedLinear
from kvd.worker.sampling import direct_draws
from kvd.worker.sampling.row import RowSettings
from kvd.worker.sampling.sampler import Sampler
from kvd.worker.serving import model_files, probe, seam
from kvd.worker.serving.runner import Row, Runner
from protocol.types import Sampling

WARM_UP = 5
PARTS = ("products", "attention", "new tokens", "norms, rope, gate")


@dataclass
class Times:
    """Durations of steps, in seconds."""

    build: list[float] = field(default_factory=list)
    draw: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU time of all threads."""

    def median_ms(self, name: str) -> float:
        """Return a median in milliseconds."""
        found: list[float] = getattr(self, name)
        return 1e3 * statistics.median(found)


class Steps:
    """Rows of the embedded model that decode greedily."""

    def __init__(self, options: argparse.Namespace, library: ModuleType | None) -> None:
        self._options = options
        loaded = model_files.load(Path(demo.__file__).parent, library=library)
        settings = CacheSettings(schemes=tuple(schemes_of(parse_kv(options.kv))))
        served = probe.serve(loaded.model, settings, loaded.vocab_size, library)
        self.runner: Runner = served.runner
        self.runner.compile()
        self.path = served.path
        self.model = loaded.model
        self._vocabulary = loaded.vocab_size
        direct_draws.prepare(loaded.vocab_size, mx.float32, library)

    def measure(self) -> Times:
        """Decode rows of the same lengths in every call. Steps are traced again, for `free`."""
        retrace(self.runner)
        cache, options, seen = self.runner.cache, self._options, Times()
        sampler, rows = Sampler(self._vocabulary), []
        for index in range(options.rows):
            prompt = [1 + (7 * at + index) % 4000 for at in range(options.tokens)]
            rows.append(cache.new_row())
            for start in range(0, options.tokens, 256):
                self.runner.prefill(rows[-1], prompt[start : start + 256])
            sampler.add(index, RowSettings(Sampling(temperature=0.0)), prompt)
        self._tokens = mx.array([5] * options.rows, mx.int32)
        for step in range(options.steps + WARM_UP):
            self._step(rows, sampler, seen if step >= WARM_UP else Times())
        for row in rows:
            cache.free(row)
        return seen

    def _step(self, rows: list[Row], sampler: Sampler, seen: Times) -> None:
        cache = self.runner.cache
        if cache.needs_flush(rows):
            cache.flush()
        start, cpu = time.perf_counter(), time.process_time()
        logits = self.runner.decode(rows, self._tokens)
        built = time.perf_counter()
        draw = sampler.draw(logits, list(range(len(rows))), [row.length for row in rows])
        drawn = time.perf_counter()
        mx.eval(draw.arrays(), cache.arrays())
        seen.build.append(built - start)
        seen.draw.append(drawn - built)
        seen.compute.append(time.perf_counter() - drawn)
        seen.cpu.append(time.process_time() - cpu)
        self._tokens = draw.tokens


def _nothing(layer: Any, x: mx.array) -> mx.array:
    outputs = layer.weight.shape[0] if isinstance(layer, nn.Linear) else layer.outputs
    return mx.broadcast_to(x[..., :1], (*x.shape[:-1], outputs))


@contextlib.contextmanager
def free(part: str) -> Iterator[None]:
    """Make a part cost almost nothing within the block."""
    from mlx_lm.models import qwen3

    replaced: dict[str, list[Any]] = {
        "products": [
            mock.patch.object(kind, "__call__", _nothing) for kind in (nn.Linear, PackedLinear)
        ],
        "attention": [mock.patch.object(seam, "decode_attention", lambda queries, *_: queries)],
        "new tokens": [mock.patch.object(DecodeStep, "append", return_value=None)],
        "norms, rope, gate": [
            mock.patch.object(mx.fast, "rms_norm", lambda x, *_: x),
            mock.patch.object(mx.fast, "rope", lambda x, *_, **__: x),
            mock.patch.object(qwen3, "swiglu", lambda _, x: x),
        ],
    }
    with contextlib.ExitStack() as stack:
        for patch in replaced[part]:
            stack.enter_context(patch)
        yield


def profile(steps: Steps, rounds: int) -> dict[str, float]:
    """Return the milliseconds of each part of a step, as medians over rounds."""
    whole = Times()
    less: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(rounds):  # alternating, because a machine's speed changes over time
        found = steps.measure()
        base = found.median_ms("compute")
        for times in ("build", "draw", "compute"):
            getattr(whole, times).extend(getattr(found, times))
        for part in PARTS:
            with free(part):
                less[part].append(base - steps.measure().median_ms("compute"))
    parts = {part: max(0.0, statistics.median(some)) for part, some in less.items()}
    parts["the rest"] = max(0.0, whole.median_ms("compute") - sum(parts.values()))
    parts["building it on the host"] = whole.median_ms("build")
    parts["drawing, on the host"] = whole.median_ms("draw")
    return parts


def compare_layers(steps: Steps, library: ModuleType, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds per step with layers of many operations and of one, in alternation."""
    found = {"many operations": Times(), "whole layers": Times()}
    for _ in range(rounds):
        for name, times in found.items():
            if name == "whole layers":
                whole_layers.fuse(steps.model, library)
            one = steps.measure()
            decoder_layers.unfuse(steps.model)
            for part in ("build", "draw", "compute", "cpu"):
                getattr(times, part).extend(getattr(one, part))
    parts = ("build", "draw", "compute", "cpu")
    return {name: {part: times.median_ms(part) for part in parts} for name, times in found.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Profile steps with MLX's operations, and with kvd's own."""
    seam.install()
    library = build.load()
    sides: dict[str, Callable[[], ModuleType | None]] = {
        "MLX's operations": lambda: None,
        "kvd's own": lambda: library,
    }
    found: dict[str, Any] = {}
    layers: dict[str, dict[str, float]] = {}
    for name, choose in sides.items():
        own = choose()
        if own is not None:
            own.use_threads(activation.thread_count())
        from mlx_lm.models import qwen3

        with (
            operations.installed(own),
            mock.patch.object(qwen3, "swiglu", activations.swiglu),
        ):
            steps = Steps(options, own)
            found[name] = {"path": steps.path, "ms": profile(steps, options.rounds)}
            if own is not None:
                layers = compare_layers(steps, own, options.rounds)
    return {
        "command": shlex.join(["python", "-m", "bench.step", *sys.argv[1:]]),
        "rows": options.rows,
        "tokens": options.tokens,
        "kv": options.kv,
        "steps": found,
        "layers": layers,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a stacked bar for each set of operations, with a segment for each part."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "kvd"
    figure, axes = plt.subplots(figsize=(8, 2.6))
    names = list(result["steps"])
    lefts = [0.0] * len(names)
    for part in result["steps"][names[0]]["ms"]:
        widths = [result["steps"][name]["ms"][part] for name in names]
        axes.barh(names, widths, left=lefts, label=part, height=0.6)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_xlabel("ms a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.3), ncol=4, fontsize=8, frameon=False)
    figure.savefig(path, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    result = measure(options)
    for name, one in result["steps"].items():
        print(f"{name} ({one['path']}): {sum(one['ms'].values()):.2f} ms a step")
        for part, milliseconds in one["ms"].items():
            print(f"  {part:26s} {milliseconds:6.2f}")
    for name, parts in result["layers"].items():
        print(f"{name}: " + ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
