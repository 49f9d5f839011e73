"""Changes to logits before the filters: bias, penalties and excluded tokens.

They apply in the order of vLLM and mlx-lm:

1. ``logit_bias`` is added.
2. The repetition penalty (Keskar et al. 2019, CTRL) applies to tokens of the prompt and the
   completion: it divides positive logits and multiplies negative ones.
3. Presence and frequency penalties are subtracted for tokens of the completion.
4. Tokens that end the completion are excluded until it has ``min_tokens`` tokens.

Penalties depend on earlier tokens, but step n+1 is launched before the tokens of step n are on the
host. Token counts therefore stay on the device, ``[penalized rows, vocabulary]``, and
`Edits.count` adds new tokens lazily. Rows without such settings are not touched.

All edits of single logits and counts add float32 at int32 places: one module of MLX's on CUDA.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from kvd.worker.sampling.draws import column
from kvd.worker.sampling.row import SamplerRow


@dataclass(slots=True)
class Counts:
    """Tokens of the penalized rows, one slot for each row."""

    vocabulary: int
    slots: list[Hashable] = field(default_factory=list)
    drawn: Any = None
    """Count of each token in the completion, ``[slots, vocabulary]`` float32."""
    prompted: Any = None
    """Tokens that the prompt contains, for the repetition penalty; ``[slots, vocabulary]`` bool."""

    _added: list[tuple[array[int], array[int]]] = field(default_factory=list)
    """Tokens of prompt and completion of the last slots, which the arrays do not have yet."""

    def add(self, key: Hashable, prompt: Sequence[int], produced: Sequence[int]) -> None:
        self.slots.append(key)
        self._added.append((array("i", prompt), array("i", produced)))

    def extend(self) -> None:
        """Extend the arrays by the slots that were added: all at once, to copy the others once."""
        if not self._added:
            return
        shape = (len(self._added), self.vocabulary)
        prompts, completions = zip(*self._added, strict=True)
        none = mx.zeros(shape, dtype=mx.float32)
        drawn = none.at[_places(completions)].add(1.0)
        prompted = none.at[_places(prompts)].add(1.0) > 0
        if self.drawn is not None:
            drawn = mx.concatenate([self.drawn, drawn])
            prompted = mx.concatenate([self.prompted, prompted])
        self.drawn, self.prompted = drawn, prompted
        self._added.clear()

    def remove(self, key: Hashable) -> None:
        kept = [slot for slot, owner in enumerate(self.slots) if owner != key]
        if len(kept) == len(self.slots):
            return
        self.extend()
        self.slots = [self.slots[slot] for slot in kept]
        if kept:
            index = mx.array(kept)
            self.drawn, self.prompted = self.drawn[index], self.prompted[index]
        else:
            self.drawn = self.prompted = None


def _places(tokens: Iterable[array[int]]) -> tuple[Any, Any]:
    """Return the row and the column of each token, one sequence of tokens for each row."""
    places: Any = array("i"), array("i")  # mlx's annotations lack buffers
    for row, own in enumerate(tokens):
        places[0].extend(array("i", [row]) * len(own))
        places[1].extend(own)
    return mx.array(places[0], dtype=mx.int32), mx.array(places[1], dtype=mx.int32)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """The penalized rows of a batch."""

    index: Any
    """Indices of these rows in the batch; None if they are all of its rows."""
    slots: Any
    """Slots of these rows in `Counts`; None if they are all slots in order."""
    repetition: Any
    presence: Any
    frequency: Any

    @staticmethod
    def of(
        rows: Sequence[SamplerRow], keys: Sequence[Hashable], counts: Counts
    ) -> _Penalties | None:
        index = [at for at, row in enumerate(rows) if row.penalized]
        if not index:
            return None
        slot_of = {key: slot for slot, key in enumerate(counts.slots)}
        slots = [slot_of[keys[at]] for at in index]
        sampling = [rows[at].settings.sampling for at in index]
        return _Penalties(
            None if len(index) == len(rows) else mx.array(index),
            None if slots == list(range(len(counts.slots))) else mx.array(slots),
            column([one.repetition_penalty for one in sampling]),
            column([one.presence_penalty for one in sampling]),
            column([one.frequency_penalty for one in sampling]),
        )

    def apply(self, logits: Any, counts: Counts) -> Any:
        drawn, prompted = counts.drawn, counts.prompted
        if self.slots is not None:
            drawn, prompted = drawn[self.slots], prompted[self.slots]
        own = logits if self.index is None else logits[self.index]
        present = drawn > 0
        reduced = mx.where(own > 0, own / self.repetition, own * self.repetition)
        own = mx.where(prompted | present, reduced, own)
        own = own - mx.where(present, self.presence + self.frequency * drawn, 0.0)
        if self.index is None:
            return own
        logits[self.index] = own
        return logits

    def count(self, tokens: Any, counts: Counts) -> None:
        own = tokens if self.index is None else tokens[self.index]
        slots = mx.arange(len(counts.slots)) if self.slots is None else self.slots
        counts.drawn = counts.drawn.at[slots, own].add(1.0)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Single logits of a batch, with a value for each."""

    rows: Any
    tokens: Any
    values: Any

    def add(self, logits: Any) -> Any:
        """Return the logits plus the values."""
        return logits.at[self.rows, self.tokens].add(self.values)

    @staticmethod
    def of(entries: list[tuple[int, int, float]]) -> _Entries | None:
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return _Entries(mx.array(rows), mx.array(tokens), mx.array(values, dtype=mx.float32))


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one batch as arrays. Built when the batch changes, and when `stale`."""

    bias: _Entries | None
    penalties: _Penalties | None
    excluded: _Entries | None
    excluding: tuple[SamplerRow, ...]
    """Rows for which ``excluded`` excludes the end tokens."""

    @staticmethod
    def of(rows: Sequence[SamplerRow], keys: Sequence[Hashable], counts: Counts) -> Edits:
        bias = [
            (at, token, value)
            for at, row in enumerate(rows)
            for token, value in row.settings.sampling.logit_bias.items()
        ]
        excluding = {at: row for at, row in enumerate(rows) if row.excludes_ends}
        excluded = [
            (at, end, -math.inf) for at, row in excluding.items() for end in row.settings.ends
        ]
        return Edits(
            _Entries.of(bias),
            _Penalties.of(rows, keys, counts),
            _Entries.of(excluded),
            tuple(excluding.values()),
        )

    @property
    def stale(self) -> bool:
        """Whether a row has reached ``min_tokens`` since the edits were built."""
        return not all(row.excludes_ends for row in self.excluding)

    def apply(self, logits: Any, counts: Counts) -> Any:
        """Return the edited logits, in float32 if there are edits."""
        if self.bias is None and self.penalties is None and self.excluded is None:
            return logits
        logits = logits.astype(mx.float32)
        if self.bias is not None:
            logits = self.bias.add(logits)
        if self.penalties is not None:
            logits = self.penalties.apply(logits, counts)
        if self.excluded is not None:
            logits = self.excluded.add(logits)
        return logits

    def count(self, tokens: Any, counts: Counts) -> None:
        """Count the drawn tokens, ``[rows]``, lazily."""
        if self.penalties is not None:
            self.penalties.count(tokens, counts)
