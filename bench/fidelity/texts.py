"""Texts to measure with: recall tasks, or parts of a text file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.fidelity.flow import Texts
from kvd.demo.recall import DIGITS, Tokenizer, make_recall_prompt


def recall_texts(tokenizer: Tokenizer, length: int, count: int) -> Texts:
    """Return recall tasks with answers: held-out prose with 24 facts, one of which is asked for.

    All rows are cut to the shortest one's length, by a few tokens at their beginning.
    """
    rows = []
    for seed in range(count):
        task = make_recall_prompt(seed, length - DIGITS, tokenizer)
        rows.append(list(tokenizer.encode(f"{task.prompt} {task.answer}")))
    shortest = min(len(row) for row in rows)
    # Tokenizers split digits differently, so the answer's tokens are counted.
    digits = min(DIGITS, len(tokenizer.encode(f" {task.answer}")))
    return Texts(np.array([row[-shortest:] for row in rows], np.int32), digits)


def file_texts(tokenizer: Tokenizer, path: Path, length: int, count: int) -> Texts:
    """Return ``count`` rows of ``length`` tokens from a text file, evenly spread over it."""
    tokens = list(tokenizer.encode(path.read_text()))
    if len(tokens) < length:
        raise ValueError(f"{path} has {len(tokens)} tokens, fewer than {length}")
    count = min(count, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return Texts(np.array([tokens[start : start + length] for start in starts], np.int32))
