"""Force texts through the dense cache and through recipes, side by side, and compare.

A text is prefilled in chunks, each attending to itself exactly and to sealed pages before it; its
last tokens are decoded. Decoding forces tokens that are known, and between two seals nothing
changes but the length, so 64 steps are one forward pass here: the same numbers, many times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from bench.fidelity.cache import FakeQuantizedCache, make_caches
from bench.fidelity.recipes import PAGE, Recipe
from kvd.worker.tools.fidelity import Agreement, Tally

CHUNK = 256
DECODED = 256
"""Tokens at the end of each text that are decoded, four pages."""


@dataclass(frozen=True)
class Texts:
    """Rows of tokens of one length, ``[rows, tokens]``."""

    tokens: np.ndarray
    answer: int = 0
    """So many tokens at the end are a recall task's digits."""

    def parts(self, rows: int) -> Iterator[Texts]:
        """Cut into batches."""
        for first in range(0, len(self.tokens), rows):
            yield Texts(self.tokens[first : first + rows], self.answer)


@dataclass
class Score:
    """What a recipe did to the model."""

    prefill: Tally = field(default_factory=Tally)
    decode: Tally = field(default_factory=Tally)
    digits: int = 0
    digits_right: int = 0

    @property
    def recall(self) -> float | None:
        """Share of the digits that are right, each after the right ones before it."""
        return self.digits_right / self.digits if self.digits else None

    def parts(self) -> dict[str, Agreement]:
        """Return the agreement of prefill and decode, as far as they saw a quantized page."""
        return {
            name: tally.agreement()
            for name, tally in (("prefill", self.prefill), ("decode", self.decode))
            if tally.positions
        }


def steps(length: int, chunk: int, decoded: int) -> Iterator[tuple[int, int, bool]]:
    """Cut ``length`` inputs into forward passes: start, stop, whether it is decoding.

    A pass of decoding steps ends before a step that seals a page: that of a page's last token, or
    the one after it where there is no tail.
    """
    prefilled = max(0, length - decoded)
    for start in range(0, prefilled, chunk):
        yield start, min(start + chunk, prefilled), False
    start = prefilled
    while start < length:
        last = start // PAGE * PAGE + PAGE - 1
        stop = min(length, last if start < last else last + 1)
        yield start, stop, True
        start = stop


def run(
    model: Any,
    texts: Texts,
    recipes: Sequence[Recipe],
    scores: dict[str, Score],
    *,
    chunk: int = CHUNK,
    decoded: int = DECODED,
) -> int:
    """Add the texts' numbers to each recipe's score, by name; return dense's right digits.

    Holds a dense cache and one of each recipe at once.
    """
    tokens = mx.array(texts.tokens)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    truth, lossy = make_prompt_cache(model), [make_caches(model, one) for one in recipes]
    right: dict[str, list[mx.array]] = {one.name: [] for one in recipes}
    dense_right = []
    for start, stop, decoding in steps(inputs.shape[1], chunk, decoded):
        here, wanted = inputs[:, start:stop], targets[:, start:stop]
        dense = model(here, cache=truth)
        mx.eval(dense)
        dense_right.append(_hits(dense, wanted))
        for recipe, caches in zip(recipes, lossy, strict=True):
            logits = model(here, cache=caches)
            mx.eval(logits, [c.state for c in caches])
            score = scores[recipe.name]
            if _is_lossy(caches):
                tally = score.decode if decoding else score.prefill
                tally.add(dense, logits, wanted)
            right[recipe.name].append(_hits(logits, wanted))
    for name, hits in right.items():
        scores[name].digits += texts.tokens.shape[0] * texts.answer
        scores[name].digits_right += _tail_sum(hits, texts.answer)
    return _tail_sum(dense_right, texts.answer)


def _is_lossy(caches: list[Any]) -> bool:
    return any(isinstance(cache, FakeQuantizedCache) and cache.lossy for cache in caches)


def _hits(logits: mx.array, wanted: mx.array) -> mx.array:
    hits = mx.argmax(logits, axis=-1) == wanted
    mx.eval(hits)
    return hits


def _tail_sum(hits: list[mx.array], count: int) -> int:
    if not count:
        return 0
    return int(mx.concatenate(hits, axis=1)[:, -count:].sum().item())
