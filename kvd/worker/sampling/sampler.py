"""The sampler of one engine: rows are added and removed; each step is one lazy call for all rows.

The random key of a draw is a hash of the row's seed, its choice and the token's position, and every
operation works on each row separately. A row therefore draws the same token, bit for bit, in any
batch and after a resume. Unused features cost nothing: a greedy batch is a single argmax.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.worker.sampling.draws import BatchSampling, sample
from kvd.worker.sampling.edits import Counts, Edits
from kvd.worker.sampling.logprobs import Scored, Scores, score
from kvd.worker.sampling.row import RowSettings, SamplerRow
from protocol.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's token, on the host."""

    token: int
    trusted: bool
    """Whether its logits were valid (`finite_and_varied`)."""
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens of one step, lazy: evaluate `arrays`, then call `read`."""

    tokens: Any
    """``[rows]`` int32."""
    trusted: Any
    """``[rows]`` bool; see `finite_and_varied`."""
    logprobs: Scores | None
    """Logprobs of the rows in ``tops``, in order."""
    tops: dict[int, int]
    """Rows that request logprobs, with their number of most likely tokens."""

    def arrays(self) -> list[Any]:
        return [self.tokens, self.trusted, *(self.logprobs.arrays() if self.logprobs else ())]

    def read(self) -> list[SampledToken]:
        """Return all rows; waits for the device."""
        scored: dict[int, Scored] = {}
        if self.logprobs is not None:
            logprobs = self.logprobs.read(list(self.tops.values()))
            scored = dict(zip(self.tops, logprobs, strict=True))
        pairs = zip(self.tokens.tolist(), self.trusted.tolist(), strict=True)
        return [SampledToken(*pair, scored.get(row)) for row, pair in enumerate(pairs)]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Derived settings, built when the rows of a step change."""

    keys: tuple[Hashable, ...]
    rows: tuple[SamplerRow, ...]
    sampling: BatchSampling
    tops: dict[int, int]
    with_logprobs: Any
    """Rows that request logprobs, as an array; None if all do."""


class Sampler:
    """Samples the rows of an engine: `add` rows, `draw` any of them, `remove` them."""

    def __init__(self, vocabulary: int) -> None:
        self._rows: dict[Hashable, SamplerRow] = {}
        self._counts = Counts(vocabulary)
        self._batch: _Batch | None = None
        self._edits: Edits | None = None

    def add(
        self,
        key: Hashable,
        settings: RowSettings,
        prompt: Sequence[int],
        produced: Sequence[int] = (),
    ) -> None:
        """Add a row. ``produced``: its tokens so far, if it is resumed.

        A resumed row continues as if it had never been removed. After a failed step, remove its
        rows and add them again with their tokens: the failed step's tokens were already counted.
        """
        if key in self._rows:
            raise LocalProtocolError(f"row {key} is sampled already")
        row = self._rows[key] = SamplerRow(settings, len(produced))
        if row.penalized:
            seen = prompt if settings.sampling.repetition_penalty != 1.0 else ()
            self._counts.add(key, seen, produced)
            self._batch = None

    def remove(self, key: Hashable) -> None:
        """Remove a row. Draws in flight are not affected."""
        self._counts.remove(key)
        row = self._rows.pop(key)
        if row.penalized or (self._batch is not None and key in self._batch.keys):
            self._batch = None  # a row with the same key may be added

    def draw(
        self, logits: Any, keys: Sequence[Hashable], positions: Sequence[int]
    ) -> SamplerOutput:
        """Draw the next token of these rows, lazily.

        ``logits``: unedited, ``[rows, vocabulary]``. ``positions``: position of the token to draw
        in each row. A resumed row must count positions as before.
        """
        batch, edits = self._prepare(tuple(keys))
        tokens = sample(edits.apply(logits, self._counts), batch.sampling, positions)
        edits.count(tokens, self._counts)
        for row in batch.rows:
            row.drawn += 1
        scores = None
        if batch.tops:
            index = batch.with_logprobs
            scored_logits = logits if index is None else logits[index]
            scored_tokens = tokens if index is None else tokens[index]
            scores = score(scored_logits, scored_tokens, top=any(batch.tops.values()))
        return SamplerOutput(tokens, finite_and_varied(logits), scores, batch.tops)

    def _prepare(self, keys: tuple[Hashable, ...]) -> tuple[_Batch, Edits]:
        batch, edits = self._batch, self._edits
        if batch is None or batch.keys != keys:
            batch, edits = self._batch_of(keys), None
        if edits is None or edits.stale:
            edits = Edits.of(batch.rows, keys, self._counts)
        self._batch, self._edits = batch, edits
        return batch, edits

    def _batch_of(self, keys: tuple[Hashable, ...]) -> _Batch:
        rows = tuple(self._rows[key] for key in keys)
        settings = [row.settings for row in rows]
        tops = {at: one.logprobs for at, one in enumerate(settings) if one.logprobs is not None}
        return _Batch(
            keys,
            rows,
            BatchSampling.of([one.sampling for one in settings], [one.choice for one in settings]),
            tops,
            None if len(tops) == len(rows) else mx.array(list(tops), dtype=mx.int32),
        )


def finite_and_varied(logits: Any) -> Any:
    """Return which rows have valid logits, ``[rows]`` bool, lazily.

    A failed buffer reads as zeros or NaN, whose most likely token would be token 0. Models may
    exclude tokens with minus infinity, so it is allowed among finite values.
    """
    largest = mx.max(logits, axis=-1)  # NaN if any logit is
    return mx.isfinite(largest) & (mx.min(logits, axis=-1) < largest)
