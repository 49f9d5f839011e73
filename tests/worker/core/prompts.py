"""Token ids of prompts for the embedded model."""

from __future__ import annotations

import random


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(tokens)]


def periodic_prompt(tokens: int, start: int) -> list[int]:
    return [(start * 31 + 7 * position) % 4000 + 10 for position in range(tokens)]
