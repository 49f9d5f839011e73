"""Measure a model: recall by length, held-out perplexity and copying.

Run it as

    python -m demo_training.evaluate --model kvd/demo --data work
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from tokenizers import Tokenizer

from demo_training import template, tool_tasks
from demo_training.model import Config, Qwen3
from kvd.demo import recall

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


class Encoder:
    """A Tokenizer with the ``encode`` method that recall.py needs."""

    def __init__(self, path: Path) -> None:
        """Read tokenizer.json."""
        self.tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self.tokenizer.encode(text).ids


@dataclass(frozen=True)
class RecallSet:
    """Prompts of one length with their answers appended, as token ids."""

    length: int
    rows: list[list[int]]


def facts_for(length: int) -> int:
    """Return 24, or as many facts as a short prompt has room for."""
    return 24 if length >= 512 else 16


def recall_set(encoder: Encoder, length: int, prompts: int, first_seed: int = 0) -> RecallSet:
    """Build the prompts of seeds ``first_seed`` and up."""
    rows = []
    for seed in range(first_seed, first_seed + prompts):
        task = recall.make_recall_prompt(seed, length, encoder, facts_for(length))
        rows.append(encoder.encode(f"{task.prompt} {task.answer}"))
    return RecallSet(length, rows)


@torch.no_grad()
def recall_accuracy(model: Qwen3, tasks: RecallSet, device: torch.device) -> tuple[int, int]:
    """Return (right digits, all digits); each digit is predicted after the answer's own digits."""
    right = 0
    digits = recall.DIGITS
    for row in tasks.rows:
        ids = torch.tensor([row], device=device)
        guess = model.logits(ids[:, :-1], digits).argmax(-1)
        right += int((guess == ids[:, -digits:]).sum())
    return right, digits * len(tasks.rows)


@torch.no_grad()
def prose_loss(model: Qwen3, tokens: np.ndarray, length: int, device: torch.device) -> float:
    """Return the mean loss of held-out prose in rows of ``length``."""
    rows = (len(tokens) - 1) // length
    total = 0.0
    for row in range(rows):
        part = torch.tensor(tokens[row * length : (row + 1) * length + 1].astype(np.int64))
        part = part.to(device)
        logits = model.logits(part[None, :-1], length)
        total += float(F.cross_entropy(logits[0], part[1:]))
    return total / rows


@torch.no_grad()
def copy_accuracy(model: Qwen3, encoder: Encoder, prompts: int, device: torch.device) -> float:
    """Return the share of words predicted correctly in copies of lists of 60 random words."""
    rng = random.Random("copy")
    words = (*recall.ADJECTIVES, *recall.NOUNS)
    right = 0
    for _ in range(prompts):
        passage = "".join(f" {word}" for word in rng.choices(words, k=60))
        ids = torch.tensor([encoder.encode(f"Text:{passage}\n\nCopy:{passage}")], device=device)
        guess = model.logits(ids[:, :-1], 60).argmax(-1)
        right += int((guess == ids[:, -60:]).sum())
    return right / (60 * prompts)


@torch.no_grad()
def call_accuracy(model: Qwen3, encoder: Encoder, tasks: int, device: torch.device) -> float:
    """Return the share of held-out requests that greedy answers serve with exactly the right calls.

    Every token must be the likeliest one after the right tokens before it, so the greedy answer is
    equal to the right one.
    """
    source = tool_tasks.Tasks(random.Random("calls"), held_out=True)
    right = 0
    for _ in range(tasks):
        task = source.call()
        prompt = template.render(task.messages[:-1], task.tools, prompt=True, thinks=task.thinks)
        whole = template.render(task.messages, task.tools).removesuffix("\n")
        answer = len(encoder.encode(whole)) - len(encoder.encode(prompt))
        ids = torch.tensor([encoder.encode(whole)], device=device)
        guess = model.logits(ids[:, :-1], answer).argmax(-1)
        right += bool((guess == ids[:, -answer:]).all())
    return right / tasks


def main() -> None:
    """Print the numbers of the model card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    c = json.loads((args.model / "config.json").read_text())
    config = Config(
        vocabulary=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"], intermediate=c["intermediate_size"], theta=c["rope_theta"],
    )  # fmt: skip
    model = Qwen3(config).to(device)
    model.load_hf(load_file(args.model / "model.safetensors"))
    encoder = Encoder(args.model / "tokenizer.json")
    for length in args.lengths:
        right, asked = recall_accuracy(model, recall_set(encoder, length, args.prompts), device)
        print(f"recall {length:5}  {right / asked:.3f} of {asked} digits", flush=True)
    loss = prose_loss(model, np.load(args.data / "data.npz")["held_out"], 2048, device)
    print(f"held-out prose: loss {loss:.3f}, perplexity {math.exp(loss):.1f} per token")
    print(f"calls {call_accuracy(model, encoder, 1000, device):.3f}")
    print(f"copying {copy_accuracy(model, encoder, 50, device):.3f}")


if __name__ == "__main__":
    main()
