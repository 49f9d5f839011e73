"""What is asked for: random prompts of several lengths, greedy and drawn, the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass

KNOWN = (300, 4000)
"""Token ids that the embedded tokenizer has for certain, without special ones."""


@dataclass(frozen=True)
class Stream:
    """One request."""

    model: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int


def make(models: list[str], count: int, *, prompt: int, completion: int, seed: int) -> list[Stream]:
    """Return so many requests, dealt out to the models.

    Prompts have half to one and a half times ``prompt`` tokens, completions likewise; every other
    one is greedy, and every fourth begins as others of its model do.
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
