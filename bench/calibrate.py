"""Times `kvctl calibrate`, with empty caches of compiled kernels and with full ones.

    python -m bench.calibrate [--model demo] [--prompts 4] [--tokens 1024] [--limit 180]
                              [--json FILE]

``--limit``: most seconds that a calibration may take, with empty caches too. The native library,
which workers on a CPU use, is not built again: the first start of kvd builds it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.bars import Bar
from bench.report import machine, publish
from kvd.worker.artifacts.entries import cache_folder

STATES = ("empty", "full")


def calibrate(model: str, folder: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Calibrate in a process with its own caches; return seconds, and the levels."""
    cache = folder / "cache"
    library = cache / "kvd" / "native"
    if not library.is_symlink():
        library.parent.mkdir(mode=0o700, parents=True)
        compiled = cache_folder("native")
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        library.symlink_to(compiled)
    environment = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "KVD_HOME": str(folder / "home"),
    }
    texts = [f"--prompts={prompts}", f"--tokens={tokens}"]
    command = [sys.executable, "-m", "kvd.cli", "calibrate", model, *texts, "--json"]
    start = time.perf_counter()
    ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "levels": json.loads(ended.stdout)["levels"],
    }


def main(given: list[str] | None = None) -> None:
    """Calibrate twice, and print the seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="length of each text")
    parser.add_argument("--limit", type=float, default=180.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    report: dict[str, Any] = {"machine": machine(), "model": Path(options.model).name, "runs": {}}
    bars = []
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        for state in STATES:
            report["runs"][state] = run = calibrate(
                options.model, Path(name), options.prompts, options.tokens
            )
            print(f"{state} caches: {run['seconds']} s", flush=True)
            what = f"seconds of a calibration, {state} caches"
            bars.append(Bar(what, run["seconds"], options.limit).as_dict())
    publish(report | {"bars": bars}, options.json)


if __name__ == "__main__":
    main()
