"""Recall through the daemon: compares quantized pages with dense ones, digit by digit.

    kvd serve &                       # or `make run`
    python -m bench.recall [--kv k8v8] [--prompts 100] [--json FILE]

Loads the embedded model twice, with dense pages (k16v16) and with ``--kv``. Sends both the same
recall prompts of 2048 to 8192 tokens, greedily. Counts the digits on which they agree, and those
that are right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer

from kvd import demo
from kvd.client import AsyncClient
from kvd.demo.recall import DIGITS, RecallTask, make_recall_prompt
from protocol.kv import KVSpec

LENGTHS = (2048, 2048, 4096, 4096, 8192)
"""Prompt lengths, used in turn."""
DENSE = "recall-dense"
QUANTIZED = "recall-quantized"


class _Encoder:
    """The embedded model's tokenizer with the interface that `make_recall_prompt` needs."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


async def _digits(client: AsyncClient, model: str, task: RecallTask) -> str:
    completion = await client.generate(model, task.prompt, max_tokens=DIGITS + 2)
    text = await completion.text()
    found = re.match(r"\s*(\d*)", text)
    return (found[1] if found else "")[:DIGITS].ljust(DIGITS, "?")


async def _run(kv: KVSpec, prompts: int, parallel: int) -> dict[str, object]:
    encoder = _Encoder()
    tasks = [
        make_recall_prompt(seed, LENGTHS[seed % len(LENGTHS)], encoder) for seed in range(prompts)
    ]
    places = asyncio.Semaphore(parallel)
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    async with AsyncClient() as client:
        for name, scheme in ((DENSE, KVSpec(16, 16)), (QUANTIZED, kv)):
            load = await client.load("demo", alias=name, kv=scheme)
            await load.result()
        try:

            async def one(seed: int, task: RecallTask) -> None:
                async with places:
                    answers = [await _digits(client, name, task) for name in (DENSE, QUANTIZED)]
                dense, quantized = answers
                count = counts[LENGTHS[seed % len(LENGTHS)]]
                for a, b, right in zip(dense, quantized, task.answer, strict=True):
                    count[0] += 1
                    count[1] += a == b
                    count[2] += a == right
                    count[3] += b == right

            await asyncio.gather(*(one(seed, task) for seed, task in enumerate(tasks)))
        finally:
            for name in (DENSE, QUANTIZED):
                await client.unload(name)
    lengths = {
        str(length): {
            "digits": count[0],
            "same_as_dense": count[1] / count[0],
            "dense_right": count[2] / count[0],
            "quantized_right": count[3] / count[0],
        }
        for length, count in sorted(counts.items())
    }
    total = [sum(count[i] for count in counts.values()) for i in range(4)]
    return {
        "kv": kv.name,
        "digits": total[0],
        "same_as_dense": total[1] / total[0],
        "dense_right": total[2] / total[0],
        "quantized_right": total[3] / total[0],
        "by_length": lengths,
    }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    match = re.fullmatch(r"k(\d+)v(\d+)", arguments.kv)
    if match is None:
        parser.error(f"a KV scheme looks like k8v4, not {arguments.kv!r}")
    kv = KVSpec(int(match[1]), int(match[2]))  # type: ignore[arg-type]
    start = time.monotonic()
    result = asyncio.run(_run(kv, arguments.prompts, arguments.parallel))
    print(json.dumps(result, indent=2))
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
