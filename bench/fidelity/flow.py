"""Runs known texts through the dense cache and through recipes, side by side, and compares.

A text is prefilled in chunks: a chunk attends to its own tokens exactly and to sealed pages before
it. The text's last tokens are decoded. Their values are known, and between two sealed pages only
the length changes. So up to 64 decode steps are one forward pass here, which gives the same numbers
many times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from bench.fidelity.cache import FakeQuantizedCache, MlxLmQuantizedCache, make_caches
from bench.fidelity.recipes import PAGE, Recipe
from kvd.worker.tools.fidelity import Agreement, Reference, Tally

CHUNK = 256
DECODED = 256
"""Tokens at the end of each text that are decoded, four pages."""


@dataclass(frozen=True)
class Texts:
    """Rows of tokens of one length, ``[rows, tokens]``."""

    tokens: np.ndarray
    answer: int = 0
    """Number of tokens at the end that are a recall task's digits."""

    def parts(self, rows: int) -> Iterator[Texts]:
        """Yield batches of ``rows`` texts."""
        for first in range(0, len(self.tokens), rows):
            yield Texts(self.tokens[first : first + rows], self.answer)


@dataclass
class Score:
    """How well the model with a recipe agrees with the model with the dense cache."""

    prefill: Tally = field(default_factory=Tally)
    decode: Tally = field(default_factory=Tally)
    digits: int = 0
    digits_right: int = 0

    @property
    def recall(self) -> float | None:
        """Share of the digits that the model predicts, each one after the text's own digits."""
        return self.digits_right / self.digits if self.digits else None

    def parts(self) -> dict[str, Agreement]:
        """Return the agreement in prefill and in decode, for each if a position was counted."""
        return {
            name: tally.agreement()
            for name, tally in (("prefill", self.prefill), ("decode", self.decode))
            if tally.positions
        }


def steps(length: int, chunk: int, decoded: int) -> Iterator[tuple[int, int, bool]]:
    """Cut ``length`` inputs into forward passes: start, stop, whether the pass decodes.

    Decode passes end before each step that may seal a page: the step of a page's last token if the
    recipe has a tail, else the step after it.
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
    """Add the texts' numbers to ``scores``; return how many digits the dense cache gets right.

    The dense cache and one cache for each recipe exist at the same time.
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
        reference = Reference.of(dense)
        dense_right.append(_hits(dense, wanted))
        for recipe, caches in zip(recipes, lossy, strict=True):
            logits = model(here, cache=caches)
            mx.eval(logits, [c.state for c in caches])
            score = scores[recipe.name]
            if _is_lossy(caches):
                tally = score.decode if decoding else score.prefill
                tally.add(reference, logits, wanted)
            right[recipe.name].append(_hits(logits, wanted))
    for name, hits in right.items():
        scores[name].digits += texts.tokens.shape[0] * texts.answer
        scores[name].digits_right += _tail_sum(hits, texts.answer)
    return _tail_sum(dense_right, texts.answer)


def _is_lossy(caches: list[Any]) -> bool:
    quantized = FakeQuantizedCache | MlxLmQuantizedCache
    return any(isinstance(cache, quantized) and cache.lossy for cache in caches)


def _hits(logits: mx.array, wanted: mx.array) -> mx.array:
    hits = mx.argmax(logits, axis=-1) == wanted
    mx.eval(hits)
    return hits


def _tail_sum(hits: list[mx.array], count: int) -> int:
    if not count:
        return 0
    return int(mx.concatenate(hits, axis=1)[:, -count:].sum().item())
