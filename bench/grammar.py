"""Measure grammars: speed relative to rows without, forced tokens, and masks of a large vocabulary.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_THREAD_TIMEOUT=12 OPENBLAS_NUM_THREADS=1 \
    python -m bench.grammar [--shape qwen2.5-0.5b] [--pairs 5] [--tokens 96] [--no-masks]
                            [--json FILE]

Runs with and without grammars alternate, and each pair gives a ratio; on a machine that does other
work, the ratio of CPU time is the steadier one. ``steps`` has means of the steps of both kinds.
``--shape``: a model with random weights, with a tokenizer as large as its vocabulary. Validity has
a campaign of its own: `tests.worker.grammar.valid_campaign`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

import mlx.core as mx

from bench import forced
from bench.bars import Bar
from bench.gpu import shapes
from bench.grammar_steps import StepWatch
from bench.masks import LONG, measure, pieces
from bench.report import machine, publish
from kvd import demo
from protocol.tools import Grammar
from protocol.types import Sampling
from tests.worker.core.driver import Driver

ROWS = 8
LEAST_RATIO = 0.95
"""Limit of the speed with grammars, relative to that without."""


def run(
    driver: Driver, grammar: Grammar | None, tokens: int, watch: StepWatch
) -> tuple[float, float, dict[str, float]]:
    """Return wall and CPU seconds per token, and what ``watch`` has seen.

    Only steps in which all `ROWS` rows decode count: rows with grammars begin and end in different
    steps.
    """
    for row in range(ROWS):
        sampling = Sampling(temperature=1.0, seed=row)
        more = {} if grammar is None else {"grammar": grammar}
        driver.submit(f"r{row}", "A list:", sampling, max_tokens=tokens, ignore_eos=True, **more)
    batch = driver.engine._batch  # noqa: SLF001
    while any(not one.tokens for one in driver.outcomes.values()):  # grammars are compiled
        driver.take(driver.engine.step())
    before = batch.generated_tokens
    watch.start()
    wall, cpu = time.perf_counter(), time.process_time()
    while not any(one.over for one in driver.outcomes.values()):
        driver.take(driver.engine.step())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    count, steps = batch.generated_tokens - before, watch.report()
    driver.run()
    driver.outcomes.clear()
    return wall / count, cpu / count, steps


def compare(driver: Driver, pairs: int, tokens: int, watch: StepWatch) -> dict[str, Any]:
    run(driver, LONG, tokens, watch)
    found: list[tuple[float, float]] = []
    speeds: list[tuple[float, float]] = []
    seconds: dict[bool, tuple[float, float]] = {}
    steps: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for number in range(pairs):
        order = (None, LONG) if number % 2 else (LONG, None)
        for grammar in order:
            *taken, seen = run(driver, grammar, tokens, watch)
            seconds[grammar is None] = (taken[0], taken[1])
            steps["without" if grammar is None else "with"].append(seen)
        plain, bound = seconds[True], seconds[False]
        found.append((plain[0] / bound[0], plain[1] / bound[1]))
        speeds.append((1 / plain[0], 1 / bound[0]))
    wall, cpu = zip(*found, strict=True)
    without, with_grammars = zip(*speeds, strict=True)
    return {
        "tokens_per_second_without": round(statistics.median(without), 1),
        "tokens_per_second_with": round(statistics.median(with_grammars), 1),
        "ratio": round(statistics.median(wall), 3),
        "ratios": [round(one, 3) for one in wall],
        "cpu_ratio": round(statistics.median(cpu), 3),
        "cpu_ratios": [round(one, 3) for one in cpu],
        "steps": {kind: _medians(found) for kind, found in steps.items()},
    }


def _medians(reports: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: statistics.median(one.get(name, 0.0) for one in reports) for name in names}


@contextmanager
def shaped(shape: str) -> Iterator[str]:
    """Yield a folder with a model of random weights, whose tokenizer has all of its tokens."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        folder = Path(name) / "model"
        shapes.write(shape, mx.bfloat16, folder)
        count = shapes.SHAPES[shape]["vocab_size"]
        tokenizer = json.loads((demo.path() / "tokenizer.json").read_text())
        known = tokenizer["model"]["vocab"]
        used = set(known.values()) | {one["id"] for one in tokenizer["added_tokens"]}
        free = (at for at in range(count) if at not in used)
        for at, word in zip(free, pieces(count), strict=False):
            known.setdefault("".join(_shown(one) for one in word), at)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        yield str(folder)


def _shown(byte: int) -> str:
    """Return the character that byte-level tokenizers write for a byte (GPT-2)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in visible:
        return chr(byte)
    return chr(256 + [one for one in range(256) if one not in visible].index(byte))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(shapes.SHAPES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--no-masks", action="store_true", help="measure only the speed of rows")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    report: dict[str, Any] = {
        "machine": machine(),
        "model": asked.shape or "demo",
        "rows": ROWS,
    }
    if not asked.no_masks:
        report["masks"] = measure()
    with nullcontext("demo") if asked.shape is None else shaped(asked.shape) as source:
        driver = Driver(source, budget=1 << 40)
        if not asked.no_masks:
            report["forced"] = forced.measure(driver.engine._batch.text.vocabulary())  # noqa: SLF001
        masks = driver.engine._batch._masks  # noqa: SLF001
        watch = StepWatch(masks)
        report["speed"] = compare(driver, asked.pairs, asked.tokens, watch)
    bar = Bar("speed with grammars", report["speed"]["ratio"], LEAST_RATIO, at_least=True)
    publish(report | {"bars": [bar.as_dict()]}, asked.json)


if __name__ == "__main__":
    main()
