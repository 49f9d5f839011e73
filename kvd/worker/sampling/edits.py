"""What a request does to its logits before they are filtered: bias, penalties, barred tokens.

In this order, which is vLLM's and mlx-lm's:

1. ``logit_bias`` is added;
2. the repetition penalty (Keskar et al. 2019, CTRL) divides positive logits of tokens that prompt
   or completion have, and multiplies negative ones;
3. presence and frequency penalties are taken from tokens that the completion has;
4. tokens that would end the completion are excluded while it has fewer than ``min_tokens``.

Penalties need to know what was drawn, and step n+1 is launched before the tokens of n are on the
host: so the counts live on the device, ``[penalized rows, vocabulary]``, and `Edits.note` adds
the drawn tokens lazily. Each op works on rows alone; rows that ask for nothing are not touched.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvd.worker.sampling.draws import column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.types import Sampling


@dataclass(slots=True)
class EditedRow:
    """One row as far as edits go."""

    sampling: Sampling
    barred: tuple[int, ...]
    min_tokens: int
    drawn: int
    """Tokens so far, those in flight too."""

    @property
    def penalized(self) -> bool:
        """Whether the row needs counts."""
        one = self.sampling
        return one.repetition_penalty != 1.0 or bool(one.presence_penalty or one.frequency_penalty)

    @property
    def bars(self) -> bool:
        """Whether the next token must not end the completion."""
        return bool(self.barred) and self.drawn < self.min_tokens


@dataclass(slots=True)
class Counts:
    """What the penalized rows have seen, one slot each."""

    vocabulary: int
    slots: list[Hashable] = field(default_factory=list)
    drawn: Any = None
    """How often the completion has each token, ``[slots, vocabulary]`` float32."""
    prompted: Any = None
    """Whether the prompt has it, for repetition penalties, ``[slots, vocabulary]`` bool."""

    def add(self, key: Hashable, prompt: Sequence[int], produced: Sequence[int]) -> None:
        """Open a slot."""
        drawn = mx.zeros((1, self.vocabulary), dtype=mx.float32)
        if produced:
            drawn = drawn.at[0, mx.array(list(produced))].add(1.0)
        prompted = mx.zeros((1, self.vocabulary), dtype=mx.bool_)
        if prompt:
            prompted[0, mx.array(list(prompt))] = True
        if self.slots:
            drawn = mx.concatenate([self.drawn, drawn])
            prompted = mx.concatenate([self.prompted, prompted])
        self.slots.append(key)
        self.drawn, self.prompted = drawn, prompted

    def remove(self, key: Hashable) -> None:
        """Close a slot."""
        kept = [slot for slot, one in enumerate(self.slots) if one != key]
        if len(kept) == len(self.slots):
            return
        self.slots = [self.slots[slot] for slot in kept]
        if kept:
            index = mx.array(kept)
            self.drawn, self.prompted = self.drawn[index], self.prompted[index]
        else:
            self.drawn = self.prompted = None


@dataclass(frozen=True, slots=True)
class _Penalties:
    """The penalized rows of a batch."""

    index: Any
    """Where they are in the batch; None if all of it."""
    slots: Any
    """Where their counts are; None if these are all slots, in order."""
    repetition: Any
    presence: Any
    frequency: Any

    @staticmethod
    def of(
        rows: Sequence[EditedRow], keys: Sequence[Hashable], counts: Counts
    ) -> _Penalties | None:
        mine = [at for at, row in enumerate(rows) if row.penalized]
        if not mine:
            return None
        where = {key: slot for slot, key in enumerate(counts.slots)}
        slots = [where[keys[at]] for at in mine]
        sampling = [rows[at].sampling for at in mine]
        return _Penalties(
            None if len(mine) == len(rows) else mx.array(mine),
            None if slots == list(range(len(counts.slots))) else mx.array(slots),
            column([one.repetition_penalty for one in sampling]),
            column([one.presence_penalty for one in sampling]),
            column([one.frequency_penalty for one in sampling]),
        )

    def apply(self, logits: Any, counts: Counts) -> Any:
        drawn, prompted = counts.drawn, counts.prompted
        if self.slots is not None:
            drawn, prompted = drawn[self.slots], prompted[self.slots]
        mine = logits if self.index is None else logits[self.index]
        present = drawn > 0
        less = mx.where(mine > 0, mine / self.repetition, mine * self.repetition)
        mine = mx.where(prompted | present, less, mine)
        mine = mine - mx.where(present, self.presence + self.frequency * drawn, 0.0)
        if self.index is None:
            return mine
        logits[self.index] = mine
        return logits

    def note(self, tokens: Any, counts: Counts) -> None:
        mine = tokens if self.index is None else tokens[self.index]
        slots = mx.arange(len(counts.slots)) if self.slots is None else self.slots
        counts.drawn = counts.drawn.at[slots, mine].add(1.0)


@dataclass(frozen=True, slots=True)
class _Places:
    """Single logits of a batch: row, token and what becomes of it."""

    rows: Any
    tokens: Any
    values: Any = None

    @staticmethod
    def of(found: list[tuple[int, int, float]]) -> _Places | None:
        if not found:
            return None
        rows, tokens, values = zip(*found, strict=True)
        return _Places(mx.array(rows), mx.array(tokens), mx.array(values, dtype=mx.float32))


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one batch as arrays: build them when it changes, or when `stale`."""

    bias: _Places | None
    penalties: _Penalties | None
    bars: _Places | None
    barring: tuple[EditedRow, ...]

    @staticmethod
    def of(rows: Sequence[EditedRow], keys: Sequence[Hashable], counts: Counts) -> Edits:
        """Return the edits of these rows, which have the counts of these keys."""
        bias = [
            (at, token, value)
            for at, row in enumerate(rows)
            for token, value in row.sampling.logit_bias.items()
        ]
        bars = [(at, token, 0.0) for at, row in enumerate(rows) if row.bars for token in row.barred]
        return Edits(
            _Places.of(bias),
            _Penalties.of(rows, keys, counts),
            _Places.of(bars),
            tuple(row for row in rows if row.bars),
        )

    @property
    def stale(self) -> bool:
        """Whether a row may end now that could not before."""
        return not all(row.bars for row in self.barring)

    def apply(self, logits: Any, counts: Counts) -> Any:
        """Return the edited logits, in float32 if there is an edit at all."""
        if self.bias is None and self.penalties is None and self.bars is None:
            return logits
        logits = logits.astype(mx.float32)
        if self.bias is not None:
            logits = logits.at[self.bias.rows, self.bias.tokens].add(self.bias.values)
        if self.penalties is not None:
            logits = self.penalties.apply(logits, counts)
        if self.bars is not None:
            logits[self.bars.rows, self.bars.tokens] = -mx.inf
        return logits

    def note(self, tokens: Any, counts: Counts) -> None:
        """Count the tokens that were drawn, ``[rows]``, lazily."""
        if self.penalties is not None:
            self.penalties.note(tokens, counts)
