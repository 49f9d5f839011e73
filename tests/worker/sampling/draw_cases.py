"""Rows with all kinds of settings, and the tokens that they draw by MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvd.worker.grammar.masking import masked
from kvd.worker.sampling.draws import BatchSampling, Group, filter_ranked
from protocol.types import Sampling

ROWS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, min_p=0.05, seed=2),
    Sampling(temperature=5.0, seed=3),
    Sampling(temperature=1.0, min_p=1.0, seed=4),
    Sampling(temperature=1.0, top_p=0.9, seed=5),
    Sampling(temperature=3.0, top_k=20, seed=6),
    Sampling(temperature=2.0, top_k=90, top_p=0.95, min_p=0.001, seed=7),
    Sampling(temperature=1.0, top_k=1, seed=8),
    Sampling(temperature=4.0, top_p=0.3, seed=9),
]


def expected(logits: mx.array, rows: list[Sampling], masks: mx.array | None = None) -> list[int]:
    """Return the tokens of the filtered logits plus Gumbel numbers; row n has position n."""
    allowed = logits if masks is None else masked(logits, masks)
    found = []
    for at, one in enumerate(rows):
        own = allowed[at : at + 1]
        if one.temperature == 0:
            found.append(int(mx.argmax(own).item()))
            continue
        group = Group.of([0], [one])
        assert group is not None
        key = BatchSampling.of([one]).keys(group, [at])[0]
        scores = filter_ranked(group, own)[0]
        found.append(int(mx.random.categorical(scores, key=key).item()))
    return found


def noise(rows: int, vocabulary: int, seed: int = 0) -> mx.array:
    """Return float32 logits, ``[rows, vocabulary]``."""
    return 3 * mx.random.normal((rows, vocabulary), key=mx.random.key(seed))


def some_masks(rows: int, vocabulary: int) -> mx.array:
    """Return masks that allow about half of the tokens, and one for certain."""
    shape = (rows, 4 * -(-vocabulary // 32))
    masks = mx.random.randint(0, 256, shape, key=mx.random.key(1)).astype(mx.uint8)
    masks[:, 0] |= 1
    return masks


def masks_of(vocabulary: int, allowed: list[list[int]]) -> mx.array:
    """Return the masks that allow these tokens."""
    bits = np.zeros((len(allowed), -(-vocabulary // 32) * 32), np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, tokens] = 1
    return mx.array(np.packbits(bits, axis=1, bitorder="little"))


ZERO = Sampling(temperature=1.0, seed=953592383109912359)
"""In position 0, the random number of token `ZERO_TOKEN` of `ZERO_VOCABULARY` is 0, and its Gumbel
number is minus infinity, as that of an excluded token."""
ZERO_TOKEN, ZERO_VOCABULARY = 12, 64
