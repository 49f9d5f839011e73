"""Times both starts of a server with a published shape, and lists what MLX compiled for them.

    python -m bench.gpu.starts [--shape qwen3-0.6b] [--kv k8v8] [--runs 2] [--json FILE]

Each run has new cache folders, as `bench.load`, and starts kvd twice: with empty and with full
caches. The modules of MLX's own operations are those that kvd has stored afterwards, so they are
what `bench.jit` predicts. Without CUDA there are none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

import mlx.core as mx

from bench import load
from bench.bars import Bar
from bench.gpu import shapes
from kvd.worker.artifacts.entries import Entries
from kvd.worker.artifacts.modules import MOST_BYTES
from kvd.worker.serving.model_files import default_dtype

MOST_MODULES = 5
"""Limit of the modules of MLX's own operations, as `bench.jit` predicts them."""


def mlx_modules(cache: Path) -> list[str]:
    """Return the names of MLX's own modules in kvd's cache folder."""
    stored = Entries(cache / "modules" / "kernels", MOST_BYTES)
    contents = (stored.get(name) for name in stored.names() if name.startswith("mlx-"))
    return sorted(content.split(b"\0")[0].decode() for content in contents if content)


async def measure(model: Path, kv: str) -> dict[str, Any]:
    """Start kvd with empty and then with full caches; return seconds, and modules after each."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        ours, _ = load.sides(str(model), Path(name), kv)
        for state in load.STATES:
            seconds = await load.first_answer(ours, Path(name, f"{state}.log"))
            modules = mlx_modules(Path(name, "cache", "kvd"))
            found[state] = {"seconds": seconds, "modules": modules}
            print(f"{state} caches: {seconds:.1f} s", *modules, sep="\n  ", flush=True)
    return found


def verdicts(runs: list[dict[str, Any]]) -> list[Bar]:
    """Return the limit of modules, for the run and the start with the most."""
    modules = max(len(start["modules"]) for run in runs for start in run.values())
    return [Bar("modules that MLX compiled", modules, MOST_MODULES)]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        model = Path(name, "model")
        shapes.write(options.shape, default_dtype() or mx.bfloat16, model)
        runs = [asyncio.run(measure(model, options.kv)) for _ in range(options.runs)]
    if options.json is not None:
        about = {"shape": options.shape, "kv": options.kv, "mlx": mx.__version__}
        bars = [bar.as_dict() for bar in verdicts(runs)]
        options.json.write_text(json.dumps(about | {"runs": runs, "bars": bars}, indent=1) + "\n")


if __name__ == "__main__":
    main()
