"""Filters and draws of a whole batch in one lazy call, however its rows differ.

The rules are mlx-lm's (`mlx_lm.sample_utils`): filters look at the probabilities before
temperature, in the order top-p, min-p, top-k; temperature applies to what they left. A row of
temperature 0 takes the most likely token.

Rows are drawn in one of four ways, by their own settings alone, and every op works on rows alone;
so a row draws the same token, bit for bit, whatever else is in the batch:

* greedy: the maximum;
* plain: from all tokens, or from those that min-p leaves;
* narrow, top-k up to `NARROW`: from the k largest, found without a sort;
* ranked, top-p alone or a larger top-k: the vocabulary's values are sorted for the threshold.

Does not cover: bias and penalties (`edits`), and when a completion is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvd.worker.sampling.keys import key_of
from kvd.worker.sampling.largest import largest
from protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.types import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: dividing by them overflows float32. The value is vLLM's."""
NARROW = 64
"""Top-k up to it needs no sort; people take 20 to 50."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one batch that are drawn in the same way, and their settings as columns."""

    rows: tuple[int, ...]
    index: Any
    """The same as an array; None if these are all rows of the batch."""
    inverse_temperature: Any
    top_p: Any
    """Above 1 where the filter is off: a sum of float32 may round to less than 1."""
    has_top_p: bool
    log_min_p: Any
    top_k: Any
    has_top_k: bool

    @staticmethod
    def of(rows: Sequence[int], sampling: Sequence[Sampling]) -> Group | None:
        """Return the group of these rows of a batch, None if there are none."""
        if not rows:
            return None
        mine = [sampling[row] for row in rows]
        return Group(
            tuple(rows),
            None if len(rows) == len(sampling) else mx.array(list(rows)),
            column([1.0 / one.temperature for one in mine]),
            column([one.top_p if one.top_p < 1.0 else 2.0 for one in mine]),
            any(one.top_p < 1.0 for one in mine),
            column([math.log(one.min_p) if one.min_p > 0.0 else -math.inf for one in mine]),
            mx.array([[one.top_k or 2**31 - 1] for one in mine], dtype=mx.int32),
            any(one.top_k for one in mine),
        )

    def select(self, logits: Any) -> Any:
        """Return these rows' logits, shifted so that the largest is 0, in float32."""
        mine = logits if self.index is None else logits[self.index]
        mine = mine.astype(mx.float32)
        return mine - mx.max(mine, axis=-1, keepdims=True)


def column(values: list[float]) -> Any:
    """Return one float32 for each row, ``[rows, 1]``."""
    return mx.array(values, dtype=mx.float32)[:, None]


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """The sampling of a batch's rows as arrays: build it when the batch changes, not each step."""

    rows: int
    seeds: tuple[tuple[int, int], ...]
    """Seed and choice of each row."""
    plain: Group | None
    narrow: Group | None
    ranked: Group | None
    sampled: Any
    """Which rows are drawn at all, ``[rows]``; None if all are."""
    slots: Any
    """Where each row's draw is in plain + narrow + ranked, ``[rows]``; None if in its place."""

    @staticmethod
    def of(sampling: Sequence[Sampling], choices: Sequence[int] | None = None) -> BatchSampling:
        """Sort the rows of a batch by how they are drawn."""
        if not all(_greedy(one) or one.seed is not None for one in sampling):
            raise LocalProtocolError("a row that is sampled needs a seed")
        drawn = [row for row, one in enumerate(sampling) if not _greedy(one)]
        ways = [_way(sampling[row]) for row in drawn]
        plain, narrow, ranked = (
            [row for row, way in zip(drawn, ways, strict=True) if way == wanted]
            for wanted in ("plain", "narrow", "ranked")
        )
        order = [*plain, *narrow, *ranked]
        everyone = list(range(len(sampling)))
        slots = {row: slot for slot, row in enumerate(order)}
        return BatchSampling(
            len(sampling),
            tuple(
                (one.seed or 0, choice)
                for one, choice in zip(sampling, choices or [0] * len(sampling), strict=True)
            ),
            Group.of(plain, sampling),
            Group.of(narrow, sampling),
            Group.of(ranked, sampling),
            None if len(drawn) == len(sampling) else mx.array([row in slots for row in everyone]),
            None if order == everyone else mx.array([slots.get(row, 0) for row in everyone]),
        )

    def keys(self, group: Group, positions: Sequence[int]) -> Any:
        """Return the random keys of a group's rows, ``[rows, 2]`` uint32."""
        found = [
            key_of(self.seeds[row][0], positions[row], self.seeds[row][1]) for row in group.rows
        ]
        return mx.array(found, dtype=mx.uint32)


def _greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _way(sampling: Sampling) -> str:
    if 0 < sampling.top_k <= NARROW:
        return "narrow"
    return "ranked" if sampling.top_k or sampling.top_p < 1.0 else "plain"


def sample(logits: Any, batch: BatchSampling, positions: Sequence[int]) -> Any:
    """Return the next token of each row, ``[rows]`` int32, lazily.

    ``logits`` is ``[rows, vocabulary]``; ``positions`` are those of the tokens to be drawn,
    counted in whatever way a resumed row counts them again.
    """
    draws = []
    if (group := batch.plain) is not None:
        draws.append(_categorical(keep_likely(group, logits), batch.keys(group, positions)))
    if (group := batch.narrow) is not None:
        places, kept = keep_largest(group, logits)
        rank = _categorical(kept, batch.keys(group, positions))
        draws.append(mx.take_along_axis(places, rank[:, None], axis=-1)[:, 0])
    if (group := batch.ranked) is not None:
        draws.append(_categorical(keep_above(group, logits), batch.keys(group, positions)))
    if not draws:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    tokens = draws[0] if len(draws) == 1 else mx.concatenate(draws)
    tokens = tokens.astype(mx.int32)
    if batch.slots is not None:
        tokens = tokens[batch.slots]
    if batch.sampled is None:
        return tokens
    return mx.where(batch.sampled, tokens, mx.argmax(logits, axis=-1).astype(mx.int32))


def keep_likely(group: Group, logits: Any) -> Any:
    """Return the tempered logits with min-p's losers at minus infinity."""
    shifted = group.select(logits)
    return mx.where(shifted < group.log_min_p, -math.inf, shifted * group.inverse_temperature)


def keep_largest(group: Group, logits: Any) -> tuple[Any, Any]:
    """Return the likeliest tokens, ``[rows, NARROW]``, and their tempered logits as far as kept.

    In falling order each filter keeps a beginning of the row, and all of them the shortest one.
    """
    shifted = group.select(logits)
    values, places = largest(shifted, NARROW)
    ranks = mx.arange(values.shape[-1], dtype=mx.int32)
    kept = (values >= group.log_min_p) & (ranks < group.top_k)
    if group.has_top_p:
        total = mx.sum(mx.exp(shifted), axis=-1, keepdims=True)
        kept = kept & (values >= _nucleus(group, values, mx.exp(values), total))
    return places, mx.where(kept, values * group.inverse_temperature, -math.inf)


def keep_above(group: Group, logits: Any) -> Any:
    """Return the tempered logits, at minus infinity what a filter drops."""
    shifted = group.select(logits)
    falling = -mx.sort(-shifted, axis=-1)
    weights = mx.exp(falling)
    total = mx.sum(weights, axis=-1, keepdims=True)
    floor = mx.maximum(_nucleus(group, falling, weights, total), group.log_min_p)
    kept = shifted >= floor
    if group.has_top_k:
        kept = kept & _first(shifted, falling, group.top_k)
    return mx.where(kept, shifted * group.inverse_temperature, -math.inf)


def _nucleus(group: Group, falling: Any, weights: Any, total: Any) -> Any:
    """Return the last value that top-p keeps, ``[rows, 1]``; ties with it stay."""
    above = mx.cumsum(weights, axis=-1, inclusive=False)
    # A token is dropped when those above it have the mass already.
    count = mx.sum(above < group.top_p * total, axis=-1, keepdims=True)
    return mx.take_along_axis(falling, mx.maximum(count, 1) - 1, axis=-1)


def _first(shifted: Any, falling: Any, top_k: Any) -> Any:
    """Return which tokens are the k largest; of equal ones the first."""
    last = mx.take_along_axis(falling, mx.minimum(top_k, falling.shape[-1]) - 1, axis=-1)
    above, level = shifted > last, shifted == last
    room = top_k - mx.sum(above, axis=-1, keepdims=True)
    return above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room))


def _categorical(logits: Any, keys: Any) -> Any:
    return mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(logits, keys)
