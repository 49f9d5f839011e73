"""Measure what llama.cpp's quantized KV costs the embedded model, on the texts of `bench.fidelity`.

    bench/llama/build.sh DIR
    python -m bench.fidelity.llama --program DIR/build/bin/llama-logits --json FILE

The reference is llama.cpp itself with keys and values in float32. Weights are the same in all runs:
matrices in float16. The same positions as in `bench.fidelity` count. llama.cpp quantizes a token
before any other attends to it, so passes of any length give the numbers of single steps.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from bench.fidelity import entries
from bench.fidelity.flow import CHUNK, DECODED, Score, Texts, steps
from bench.fidelity.texts import recall_texts
from bench.llama import gguf
from kvd import demo
from kvd.worker.serving import model_files
from kvd.worker.tools.fidelity import Reference

REFERENCE = ("f32", "0")
TYPES = {"f16": ("f16", "1"), "q8_0": ("q8_0", "1"), "q4_0": ("q4_0", "1")}
"""Types of keys and values, and whether flash attention is on: quantized values need it."""
BYTES = {"f16": 1.0, "q8_0": 8.5 / 16, "q4_0": 4.5 / 16}
"""Bytes relative to 16-bit KV: blocks of 32 elements with a 16-bit scale."""
LENGTHS = (1024, 2048, 4096, 8192)


def logits(program: Path, model: Path, setting: tuple[str, str], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of all ``tokens``, ``[tokens, vocab]`` in float32, on disk.

    Raises ``subprocess.CalledProcessError`` if the program fails.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as found:
        given.write(tokens.astype(np.int32).tobytes())
        given.seek(0)
        subprocess.run([program, model, *setting, "1"], stdin=given, stdout=found, check=True)
        return np.memmap(found, np.float32, "r").reshape(len(tokens), -1)


def add(score: Score, dense: np.ndarray, lossy: np.ndarray, tokens: np.ndarray, answer: int) -> int:
    """Add a text's positions to ``score``; return how many digits the reference has right.

    ``dense``, ``lossy``: logits of all tokens but the last.
    """
    targets = tokens[1:]
    for start, stop, decoding in steps(len(dense), CHUNK, DECODED):
        if start:  # as in `bench.fidelity`, where nothing before the first chunk is quantized
            tally = score.decode if decoding else score.prefill
            there, *others = (mx.array(one[start:stop]) for one in (dense, lossy, targets))
            tally.add(Reference.of(there), *others)
    right = [one[-answer:].argmax(axis=1) == targets[-answer:] for one in (dense, lossy)]
    score.digits += answer
    score.digits_right += int(right[1].sum())
    return int(right[0].sum())


def measure(program: Path, model: Path, texts: Texts) -> tuple[dict[str, Score], int]:
    """Return the scores by type, and how many digits the reference has right."""
    scores, right = {name: Score() for name in TYPES}, 0
    for tokens in texts.tokens:
        dense = logits(program, model, REFERENCE, tokens[:-1])
        for name, setting in TYPES.items():
            lossy = logits(program, model, setting, tokens[:-1])
            digits = add(scores[name], dense, lossy, tokens, texts.answer)
        right += digits
    return scores, right


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fidelity.llama",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--program",
        type=Path,
        required=True,
        help="llama-logits of bench/llama/build.sh",
    )
    add("--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens (default: {LENGTHS})")
    add("--prompts", type=int, default=3, help="texts of each length (default: 3)")
    add("--json", type=Path, help="write everything here")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write after each length."""
    arguments = _arguments()
    results: list[dict[str, Any]] = []
    dense: list[dict[str, Any]] = []
    found = {
        "model": "demo",
        "text": "recall tasks",
        "dtype": "float16 matrices",
        "device": f"CPU, {platform.system()} {platform.machine()}",
        "command": shlex.join(["python", "-m", "bench.fidelity.llama", *sys.argv[1:]]),
        "dense": dense,
        "results": results,
    }
    tokenizer = model_files.load(demo.path()).tokenizer
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "demo.gguf"
        gguf.write(demo.path(), model)
        for length in arguments.lengths:
            texts = recall_texts(tokenizer, length, arguments.prompts)
            scores, right = measure(arguments.program, model, texts)
            rows, tokens = texts.tokens.shape
            recall = right / (rows * texts.answer)
            dense.append({"length": length, "texts": rows, "tokens": tokens, "recall": recall})
            for name, score in scores.items():
                results.append(entries.entry(f"llama {name}", length, BYTES[name], score))
                print(entries.line(results[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(entries.compact(found))


if __name__ == "__main__":
    main()
