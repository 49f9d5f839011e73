"""Train a wider model of the embedded one's kind for some minutes, and export it for mlx-lm.

    python -m bench.gpu.train --data DIR --minutes 7 --folder DIR [--config JSON] [--json FILE]

``--data`` is what `demo_training.prepare` wrote. Nothing else may run on the device meanwhile,
because the learning rate follows the clock. `bench.fidelity` can then measure the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.bars import Bar
from kvd import demo

ROOT = Path(__file__).parents[2]
LEAST_RECALL = 0.9
"""Limit of recall at the shortest length: bits cannot cost a model recall that it does not have."""


def train(options: argparse.Namespace, run: Path) -> list[str]:
    """Train into ``run`` and export to ``--folder``; return the lines of the log."""
    tokenizer = demo.path() / "tokenizer.json"
    command = ["--data", options.data, "--tokenizer", tokenizer, "--out", run]
    command += ["--minutes", options.minutes, "--config", options.config]
    command += ["--seed", options.seed, "--tokens", options.tokens, "--loaders", options.loaders]
    if options.eval_lengths:
        command += ["--eval-lengths", *options.eval_lengths]
    _module("train", *command)
    _module("export", "--checkpoint", run, "--out", options.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.path() / name, options.folder / name)
    return (run / "log.txt").read_text().splitlines()


def _module(name: str, *arguments: object) -> None:
    """Run a module of `demo_training` from this checkout."""
    paths = [str(ROOT / "tools" / "demo_model"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", f"demo_training.{name}", *map(str, arguments)]
    subprocess.run(command, check=True, env=environment)


def recall(lines: list[str]) -> dict[int, float]:
    """Return the shares of recalled digits by length, from the last evaluation in a log."""
    last = next((line for line in reversed(lines) if " recall " in line), "")
    return {int(length): float(share) for length, share in re.findall(r"(\d+):([\d.]+)", last)}


def report(options: argparse.Namespace, lines: list[str], seconds: float) -> dict[str, Any]:
    """Return the contents of the JSON file."""
    found = recall(lines)
    shortest = found[min(found)] if found else float("nan")
    bar = Bar("recall at the shortest length", shortest, LEAST_RECALL, at_least=True)
    return {
        "config": json.loads(options.config),
        "minutes": options.minutes,
        "seed": options.seed,
        "seconds": seconds,
        "recall": found,
        "log": lines,
        "bars": [bar.as_dict()],
    }


def main(arguments: list[str] | None = None) -> None:
    """Train, export and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is written")
    parser.add_argument("--config", default="{}", help="JSON of the model's shape")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per step")
    parser.add_argument("--loaders", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--eval-lengths", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvd-train-") as run:
        lines = train(options, Path(run))
    if options.json is not None:
        found = report(options, lines, time.monotonic() - start)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
