"""Drawing the next token of every row in one batched, lazy call.

The rules are mlx-lm's (`mlx_lm.sample_utils`): filters look at the probabilities before
temperature, in the order top-p, min-p, top-k; temperature applies to what they left. A row of
temperature 0 takes the most likely token.

Each draw has its own key, a hash of the row's seed and of the token's position, and each op here
works on rows alone, so that a row draws the same token, bit for bit, whatever else is in the
batch, and again after a resume.

Does not cover: penalties, logit bias, and when a completion is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.types import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: dividing by them overflows float32. The value is vLLM's."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one batch that are drawn in the same way, and their settings as columns."""

    rows: tuple[int, ...]
    index: Any
    """The same as an array; None if these are all rows of the batch."""
    inverse_temperature: Any
    top_p: Any
    """Above 1 where the filter is off: a sum of float32 may round to less than 1."""
    log_min_p: Any
    top_k: Any

    @staticmethod
    def of(rows: Sequence[int], sampling: Sequence[Sampling]) -> _Group | None:
        if not rows:
            return None
        mine = [sampling[row] for row in rows]
        return _Group(
            tuple(rows),
            None if len(rows) == len(sampling) else mx.array(list(rows)),
            _column([1.0 / one.temperature for one in mine]),
            _column([one.top_p if one.top_p < 1.0 else 2.0 for one in mine]),
            _column([math.log(one.min_p) if one.min_p > 0.0 else -math.inf for one in mine]),
            mx.array([[one.top_k or 2**31 - 1] for one in mine], dtype=mx.int32),
        )

    def select(self, logits: Any) -> Any:
        """Return these rows' logits, shifted so that the largest is 0, in float32."""
        mine = logits if self.index is None else logits[self.index]
        mine = mine.astype(mx.float32)
        return mine - mx.max(mine, axis=-1, keepdims=True)


def _column(values: list[float]) -> Any:
    return mx.array(values, dtype=mx.float32)[:, None]


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """The sampling of a batch's rows as arrays: build it when the batch changes, not each step."""

    rows: int
    seeds: tuple[int, ...]
    plain: _Group | None
    """Rows that are drawn from all tokens, or from those that min-p leaves."""
    ranked: _Group | None
    """Rows with top-p or top-k: the only ones that need a sort."""
    sampled: Any
    """Which rows are drawn at all, ``[rows]``; None if all are."""
    slots: Any
    """Where each row's draw is in plain + ranked, ``[rows]``."""

    @staticmethod
    def of(sampling: Sequence[Sampling]) -> BatchSampling:
        """Sort the rows of a batch by how they are drawn."""
        if not all(_greedy(one) or one.seed is not None for one in sampling):
            raise LocalProtocolError("a row that is sampled needs a seed")
        drawn = [row for row, one in enumerate(sampling) if not _greedy(one)]
        plain = [row for row in drawn if not _needs_ranks(sampling[row])]
        ranked = [row for row in drawn if _needs_ranks(sampling[row])]
        slots = {row: slot for slot, row in enumerate(plain + ranked)}
        everyone = range(len(sampling))
        return BatchSampling(
            len(sampling),
            tuple(one.seed or 0 for one in sampling),
            _Group.of(plain, sampling),
            _Group.of(ranked, sampling),
            None if len(drawn) == len(sampling) else mx.array([row in slots for row in everyone]),
            mx.array([slots.get(row, 0) for row in everyone]),
        )


def _greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _needs_ranks(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0


def sample(logits: Any, batch: BatchSampling, positions: Sequence[int]) -> Any:
    """Return the next token of each row, ``[rows]`` int32, lazily.

    ``logits`` is ``[rows, vocabulary]``; ``positions`` are those of the tokens to be drawn,
    counted in whatever way a resumed row counts them again.
    """
    if batch.plain is None and batch.ranked is None:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    draws = []
    if (group := batch.plain) is not None:
        draws.append(_categorical(_keep_likely(group, logits), _keys(group, batch, positions)))
    if (group := batch.ranked) is not None:
        order, kept = _keep_first(group, logits)
        rank = _categorical(kept, _keys(group, batch, positions))
        draws.append(mx.take_along_axis(order, rank[:, None], axis=-1)[:, 0])
    tokens = mx.concatenate(draws).astype(mx.int32)[batch.slots]
    if batch.sampled is None:
        return tokens
    return mx.where(batch.sampled, tokens, mx.argmax(logits, axis=-1).astype(mx.int32))


def _keep_likely(group: _Group, logits: Any) -> Any:
    """Return the tempered logits with min-p's losers at minus infinity."""
    shifted = group.select(logits)
    return mx.where(shifted < group.log_min_p, -math.inf, shifted * group.inverse_temperature)


def _keep_first(group: _Group, logits: Any) -> tuple[Any, Any]:
    """Return the tokens by falling probability, and their tempered logits as far as kept.

    Sorted, each filter keeps a beginning of the row, and all of them the shortest one.
    """
    shifted = group.select(logits)
    order = mx.argsort(-shifted, axis=-1)
    shifted = mx.take_along_axis(shifted, order, axis=-1)
    weights = mx.exp(shifted)
    above = mx.cumsum(weights, axis=-1, inclusive=False)
    total = above[:, -1:] + weights[:, -1:]
    # top-p drops a token when those above it have the mass already; ties with the last stay.
    count = mx.sum(above < group.top_p * total, axis=-1, keepdims=True)
    last = mx.take_along_axis(shifted, mx.maximum(count, 1) - 1, axis=-1)
    ranks = mx.arange(shifted.shape[-1], dtype=mx.int32)
    kept = (shifted >= last) & (shifted >= group.log_min_p) & (ranks < group.top_k)
    return order, mx.where(kept, shifted * group.inverse_temperature, -math.inf)


def _categorical(logits: Any, keys: Any) -> Any:
    return mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(logits, keys)


def _keys(group: _Group, batch: BatchSampling, positions: Sequence[int]) -> Any:
    return mx.array(
        [key_of(batch.seeds[row], positions[row]) for row in group.rows], dtype=mx.uint32
    )


def key_of(seed: int, position: int) -> tuple[int, int]:
    """Return the random key of one row's token: two words of 32 bits."""
    # The seed is mixed on its own first: seeds that differ by the gamma of splitmix64 would
    # otherwise give the same stream, one position later.
    word = _mix(_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)
    return word >> 32, word & 0xFFFFFFFF


def _mix(word: int) -> int:
    """Finish splitmix64 (Steele, Lea and Flood 2014)."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def finite_and_varied(logits: Any) -> Any:
    """Return which rows can be trusted, ``[rows]`` bool, lazily.

    A buffer that failed reads as zeros or NaN, and the most likely token of both is token 0.
    Minus infinity is a model's way to exclude a token; it is allowed beside finite values.
    """
    largest = mx.max(logits, axis=-1)  # NaN if any is
    return mx.isfinite(largest) & (mx.min(logits, axis=-1) < largest)
