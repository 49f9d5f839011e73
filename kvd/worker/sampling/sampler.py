"""The sampler of one engine: rows join and leave it, and each step is one lazy call for all.

Each draw has its own key, a hash of the row's seed, its choice and the token's position, and each
op works on rows alone, so that a row draws the same token, bit for bit, whatever else is in the
batch, and again after a resume. Rows that ask for nothing special cost nothing: a greedy batch is
one argmax.

Does not cover: when a completion is over (`text`), and what is done about rows not to be trusted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvd.worker.sampling.draws import BatchSampling, sample
from kvd.worker.sampling.edits import Counts, EditedRow, Edits
from kvd.worker.sampling.logprobs import Scored, Scores, score
from protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Collection

    from protocol.types import Sampling
    from protocol.worker import Submit

__all__ = [
    "BatchSampling",
    "RowSettings",
    "SampledToken",
    "Sampler",
    "SamplerOutput",
    "finite_and_varied",
    "sample",
]


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How one row is drawn and what is told about it."""

    sampling: Sampling
    """With a seed, unless it is greedy."""
    choice: int = 0
    """Which of a request's completions."""
    ends: tuple[int, ...] = ()
    """Tokens that end the completion."""
    min_tokens: int = 0
    """None of them is drawn before so many."""
    logprobs: int | None = None
    """The most likely tokens to tell, with the drawn one; None: nothing."""

    @staticmethod
    def of(request: Submit, ends: Collection[int], choice: int = 0) -> RowSettings:
        """Return the settings of one completion; ``ends`` are those of its `TextStream`."""
        return RowSettings(
            request.sampling, choice, tuple(sorted(ends)), request.min_tokens, request.logprobs
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's token on the host."""

    token: int
    trusted: bool
    scored: Scored | None = None
    """Its logprobs, if the row wants them."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One step's tokens, lazy: evaluate `arrays`, then `read`."""

    tokens: Any
    """``[rows]`` int32."""
    trusted: Any
    """``[rows]`` bool; see `finite_and_varied`."""
    logprobs: Scores | None
    """Of the rows that want them, in order."""
    tops: dict[int, int]
    """Those rows, and how many of the most likely tokens each wants."""

    def arrays(self) -> list[Any]:
        """Return what is to be evaluated."""
        return [self.tokens, self.trusted, *(self.logprobs.arrays() if self.logprobs else ())]

    def read(self) -> list[SampledToken]:
        """Return all rows on the host; waits for the device."""
        scored: dict[int, Scored] = {}
        if self.logprobs is not None:
            told = self.logprobs.read(list(self.tops.values()))
            scored = dict(zip(self.tops, told, strict=True))
        pairs = zip(self.tokens.tolist(), self.trusted.tolist(), strict=True)
        return [SampledToken(*pair, scored.get(row)) for row, pair in enumerate(pairs)]


@dataclass(slots=True)
class _Row:
    settings: RowSettings
    edited: EditedRow


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is built when the rows of a step change."""

    keys: tuple[Hashable, ...]
    rows: tuple[_Row, ...]
    sampling: BatchSampling
    tops: dict[int, int]
    wanted: Any
    """Rows that want logprobs, as an array; None if all do."""


class Sampler:
    """The rows of an engine: `add`, then `draw` with any of them, then `remove`."""

    def __init__(self, vocabulary: int) -> None:
        self._rows: dict[Hashable, _Row] = {}
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
        """Let a row in; ``produced`` are the tokens that it has already, after a resume.

        It goes on as if it had never been away. After a step that failed, remove all its rows and
        add them again with what they have: the step's tokens are counted already.
        """
        if key in self._rows:
            raise LocalProtocolError(f"row {key} is sampled already")
        sampling = settings.sampling
        edited = EditedRow(sampling, settings.ends, settings.min_tokens, len(produced))
        self._rows[key] = _Row(settings, edited)
        if edited.penalized:
            seen = prompt if sampling.repetition_penalty != 1.0 else ()
            self._counts.add(key, seen, produced)
            self._batch = None

    def remove(self, key: Hashable) -> None:
        """Forget a row; draws that are in flight are not disturbed."""
        self._counts.remove(key)
        row = self._rows.pop(key)
        if row.edited.penalized or (self._batch is not None and key in self._batch.keys):
            self._batch = None  # it may come back under the same key

    def draw(
        self, logits: Any, keys: Sequence[Hashable], positions: Sequence[int]
    ) -> SamplerOutput:
        """Draw the next token of these rows, lazily.

        ``logits`` is ``[rows, vocabulary]``, as the model gave them; ``positions`` are those of
        the tokens to be drawn, counted in whatever way a resumed row counts them again.
        """
        batch, edits = self._prepared(tuple(keys))
        edited = edits.apply(logits, self._counts)
        tokens = sample(edited, batch.sampling, positions)
        edits.note(tokens, self._counts)
        for row in batch.rows:
            row.edited.drawn += 1
        scores = None
        if batch.tops:
            mine = logits if batch.wanted is None else logits[batch.wanted]
            drawn = tokens if batch.wanted is None else tokens[batch.wanted]
            scores = score(mine, drawn, top=any(batch.tops.values()))
        return SamplerOutput(tokens, finite_and_varied(logits), scores, batch.tops)

    def _prepared(self, keys: tuple[Hashable, ...]) -> tuple[_Batch, Edits]:
        batch, edits = self._batch, self._edits
        if batch is None or batch.keys != keys:
            batch, edits = self._batch_of(keys), None
        if edits is None or edits.stale:
            edits = Edits.of([row.edited for row in batch.rows], keys, self._counts)
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
    """Return which rows can be trusted, ``[rows]`` bool, lazily.

    A buffer that failed reads as zeros or NaN, and the most likely token of both is token 0.
    Minus infinity is a model's way to exclude a token; it is allowed beside finite values.
    """
    largest = mx.max(logits, axis=-1)  # NaN if any is
    return mx.isfinite(largest) & (mx.min(logits, axis=-1) < largest)
