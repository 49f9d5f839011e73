"""The requests: random prompts of several lengths, greedy and sampled, the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass

KNOWN = (300, 4000)
"""Range of token ids that the embedded tokenizer has and that are not special tokens."""


@dataclass(frozen=True)
class Stream:
    """One request."""

    model: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int


def make(models: list[str], count: int, *, prompt: int, completion: int, seed: int) -> list[Stream]:
    """Return ``count`` requests, distributed evenly over the models.

    Prompts have half to one and a half times ``prompt`` tokens, completions likewise. Every second
    request is greedy. Every fourth request of a model begins with the same tokens.
    """
    rng = random.Random(seed)
    heads = {model: rng.choices(range(*KNOWN), k=max(64, prompt // 4)) for model in models}
    found = []
    for number in range(count):
        model = models[number % len(models)]
        length = rng.randint(prompt // 2, prompt * 3 // 2)
        tokens = rng.choices(range(*KNOWN), k=length)
        if number // len(models) % 4 == 0:
            tokens = (heads[model] + tokens)[:length]
        found.append(
            Stream(
                model=model,
                tokens=tokens,
                max_tokens=rng.randint(completion // 2, completion * 3 // 2),
                temperature=0.8 if number % 2 else 0.0,
                seed=number,
            )
        )
    return found
