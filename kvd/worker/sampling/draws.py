"""Filters and draws for a whole batch in one lazy call, with any mix of settings.

The rules are mlx-lm's (`mlx_lm.sample_utils`). Filters apply to the probabilities before
temperature, in the order top-p, min-p, top-k. Temperature applies to the remaining tokens. A row
with temperature 0 takes the most likely token.

Where a single operation draws all rows (`kvd.worker.sampling.direct_draws`), this module has only
its settings and the random keys. Elsewhere each row is drawn by one of three methods, chosen by its
own settings:

* greedy: the maximum;
* plain: from all tokens, or those that min-p keeps;
* ranked, for top-p or top-k: all logits are sorted to find the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.worker.sampling.largest import pick
from protocol.errors import LocalProtocolError
from protocol.types import Sampling

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: dividing by them overflows float32. The value is vLLM's."""

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
"""Constant of splitmix64: the golden ratio as an odd number."""
_STREAMS = 0xD1342543DE82EF95
"""Multiplier that separates choices (Steele and Vigna 2021). With `_GAMMA`, which separates
positions, a choice of one seed could have the key of a position of another seed."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a batch that are drawn by the same method, with their settings as columns."""

    rows: tuple[int, ...]
    index: Any
    """``rows`` as an array; None if these are all rows of the batch."""
    inverse_temperature: Any
    top_p: Any
    """2 if the filter is off: at 1, rounding of the cumulative sum could drop tokens."""
    has_top_p: bool
    log_min_p: Any
    top_k: Any
    has_top_k: bool

    @staticmethod
    def of(rows: Sequence[int], sampling: Sequence[Sampling]) -> Group | None:
        if not rows:
            return None
        own = [sampling[row] for row in rows]
        return Group(
            tuple(rows),
            None if len(rows) == len(sampling) else mx.array(list(rows)),
            column([1.0 / one.temperature for one in own]),
            column([one.top_p if one.top_p < 1.0 else 2.0 for one in own]),
            any(one.top_p < 1.0 for one in own),
            column([_log_min_p(one) for one in own]),
            mx.array([[one.top_k or 2**31 - 1] for one in own], dtype=mx.int32),
            any(one.top_k for one in own),
        )

    def select(self, logits: Any) -> Any:
        """Return these rows' logits in float32, shifted so that the largest is 0."""
        own = logits if self.index is None else logits[self.index]
        own = own.astype(mx.float32)
        return own - mx.max(own, axis=-1, keepdims=True)


def column(values: list[float]) -> Any:
    """Return one float32 for each row, ``[rows, 1]``."""
    return mx.array(values, dtype=mx.float32)[:, None]


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """Sampling settings of a batch as arrays. Built when the batch changes, not in each step."""

    rows: int
    seeds: tuple[tuple[int, int], ...]
    """Seed and choice of each row."""
    plain: Group | None
    ranked: Group | None
    sampled: Any
    """Rows that are not greedy, ``[rows]`` bool; None if none is greedy. Not used if ``direct``."""
    slots: Any
    """Index of each row's draw in plain + ranked, ``[rows]``; None if in batch order."""
    direct: Any = None
    """Settings for a single operation that draws all rows, ``[rows, 4]`` float32: the inverse
    temperature (0: greedy), the logarithm of min-p, top-p (2: off) and top-k (0: off). None: there
    is no such operation."""
    no_keys: Any = None
    """Zeros, ``[rows, 2]`` uint32, in place of random keys if ``direct`` draws greedy rows only."""

    @staticmethod
    def of(
        sampling: Sequence[Sampling],
        choices: Sequence[int] | None = None,
        *,
        direct: bool = False,
    ) -> BatchSampling:
        """``direct``: whether a single operation draws all rows."""
        methods = [_method(one) for one in sampling]
        for method, one in zip(methods, sampling, strict=True):
            if method != "greedy" and one.seed is None:
                raise LocalProtocolError("a row that is sampled needs a seed")
        plain, ranked = (
            [row for row, method in enumerate(methods) if method == name and not direct]
            for name in ("plain", "ranked")
        )
        order = [*plain, *ranked]
        rows = list(range(len(sampling)))
        slots = {row: slot for slot, row in enumerate(order)}
        return BatchSampling(
            len(sampling),
            tuple(
                (one.seed or 0, choice)
                for one, choice in zip(sampling, choices or [0] * len(sampling), strict=True)
            ),
            Group.of(plain, sampling),
            Group.of(ranked, sampling),
            None if len(order) == len(rows) else mx.array([row in slots for row in rows]),
            None if order == rows else mx.array([slots.get(row, 0) for row in rows]),
            mx.array([*map(_direct, sampling)], dtype=mx.float32) if direct else None,
            mx.zeros((len(rows), 2), mx.uint32) if direct and set(methods) == {"greedy"} else None,
        )

    def all_keys(self, positions: Sequence[int]) -> Any:
        """Return the random keys of all rows, ``[rows, 2]`` uint32."""
        if self.no_keys is not None:
            return self.no_keys
        keys = [
            key_of(seed, position, choice)
            for (seed, choice), position in zip(self.seeds, positions, strict=True)
        ]
        return mx.array(keys, dtype=mx.uint32)

    def keys(self, group: Group, positions: Sequence[int]) -> Any:
        """Return the random keys of a group's rows, ``[rows, 2]`` uint32."""
        keys = [
            key_of(self.seeds[row][0], positions[row], self.seeds[row][1]) for row in group.rows
        ]
        return mx.array(keys, dtype=mx.uint32)


def _method(sampling: Sampling) -> str:
    if sampling.temperature < GREEDY_BELOW:
        return "greedy"
    return "ranked" if sampling.top_k or sampling.top_p < 1.0 else "plain"


def _direct(sampling: Sampling) -> tuple[float, float, float, float]:
    if _method(sampling) == "greedy":
        return 0.0, -math.inf, 2.0, 0.0
    top_p = sampling.top_p if sampling.top_p < 1.0 else 2.0
    return 1.0 / sampling.temperature, _log_min_p(sampling), top_p, float(sampling.top_k)


def _log_min_p(sampling: Sampling) -> float:
    return math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def sample(logits: Any, batch: BatchSampling, positions: Sequence[int]) -> Any:
    """Return the next token of each row, ``[rows]`` int32, lazily.

    ``logits``: ``[rows, vocabulary]``. ``positions``: position of the token to draw in each row.
    """
    draws = []
    if (group := batch.plain) is not None:
        draws.append(_categorical(filter_plain(group, logits), batch.keys(group, positions)))
    if (group := batch.ranked) is not None:
        draws.append(_categorical(filter_ranked(group, logits), batch.keys(group, positions)))
    if not draws:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    tokens = draws[0] if len(draws) == 1 else mx.concatenate(draws)
    tokens = tokens.astype(mx.int32)
    if batch.slots is not None:
        tokens = pick(tokens, batch.slots)
    if batch.sampled is None:
        return tokens
    return mx.where(batch.sampled, tokens, mx.argmax(logits, axis=-1).astype(mx.int32))


def filter_plain(group: Group, logits: Any) -> Any:
    """Return logits divided by temperature; minus infinity for tokens that min-p drops."""
    shifted = group.select(logits)
    return mx.where(shifted < group.log_min_p, -math.inf, shifted * group.inverse_temperature)


def filter_ranked(group: Group, logits: Any) -> Any:
    """Return logits divided by temperature; minus infinity for tokens that a filter drops."""
    shifted = group.select(logits)
    descending = -mx.sort(-shifted, axis=-1)
    weights = mx.exp(descending)
    total = mx.sum(weights, axis=-1, keepdims=True)
    floor = mx.maximum(_nucleus(group, descending, weights, total), group.log_min_p)
    kept = shifted >= floor
    if group.has_top_k:
        kept = kept & _first(shifted, descending, group.top_k)
    return mx.where(kept, shifted * group.inverse_temperature, -math.inf)


def _nucleus(group: Group, descending: Any, weights: Any, total: Any) -> Any:
    """Return the smallest logit that top-p keeps, ``[rows, 1]``; ties with it are kept."""
    above = mx.cumsum(weights, axis=-1, inclusive=False)
    # A token is dropped if the tokens above it already reach the mass.
    count = mx.sum(above < group.top_p * total, axis=-1, keepdims=True)
    return pick(descending, mx.maximum(count, 1) - 1)


def _first(shifted: Any, descending: Any, top_k: Any) -> Any:
    """Return which tokens are the k largest; of equal logits the first ones count."""
    last = pick(descending, mx.minimum(top_k, descending.shape[-1]) - 1)
    above, equal = shifted > last, shifted == last
    room = top_k - mx.sum(above, axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))


def _categorical(logits: Any, keys: Any) -> Any:
    return mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(logits, keys)


def key_of(seed: int, position: int, choice: int = 0) -> tuple[int, int]:
    """Return the random key of one token, two words of 32 bits: a hash of the arguments alone."""
    # The seed is mixed first. Otherwise seeds that differ by the gamma of splitmix64 would give
    # the same stream, shifted by one position.
    stream = _mix(seed)
    if choice:
        stream = _mix(stream ^ (choice * _STREAMS))
    word = _mix(stream + (position + 1) * _GAMMA)
    return word >> 32, word & 0xFFFFFFFF


def _mix(word: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
