"""The sampler of one engine: rows are added and removed; each step is one lazy call for all rows.

Penalties and logprobs, and filters by operations of MLX, take up to 16 copies of the logits. The
rows of a step are therefore drawn in parts of at most `SAMPLED_AT_ONCE` bytes of logits, one after
the other.

Masks of grammars apply after all other edits: a token that the grammar forbids has minus infinity.

The random key of a draw is a hash of the row's seed, its choice and the token's position, and every
operation works on each row separately. A row therefore draws the same token, bit for bit, in any
batch and after a resume. Unused features cost nothing: a batch without edits and logprobs is one
operation where there is one for all draws (`kvd.worker.sampling.direct_draws`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx

from kvd.worker.grammar import masking
from kvd.worker.sampling import direct_draws
from kvd.worker.sampling.direct_draws import DirectDraws
from kvd.worker.sampling.draws import BatchSampling, sample
from kvd.worker.sampling.edits import Counts, Edits
from kvd.worker.sampling.largest import pick
from kvd.worker.sampling.logprobs import Scored, Scores, score
from kvd.worker.sampling.row import RowSettings, SamplerRow
from kvd.worker.sampling.valid_logits import finite_and_varied
from protocol.errors import LocalProtocolError
from protocol.memory_bounds import SAMPLED_AT_ONCE

Share = Callable[[Any], Any]
"""Takes the tokens of a step, ``[rows]`` int32, and returns the same tokens, both lazy."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's token, on the host."""

    token: int
    trusted: bool
    """Whether its logits were valid (`finite_and_varied`)."""
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class _PartOutput:
    """The tokens of one part of a step's rows, lazy."""

    tokens: Any
    """``[rows]`` int32."""
    trusted: Any
    """``[rows]``, 0 for rows whose logits are not valid; see `finite_and_varied`."""
    logprobs: Scores | None
    """Logprobs of the rows in ``tops``, in order."""
    tops: dict[int, int]
    """Rows that request logprobs, with their number of most likely tokens."""

    def arrays(self) -> list[Any]:
        return [self.tokens, self.trusted, *(self.logprobs.arrays() if self.logprobs else ())]

    def read(self) -> list[SampledToken]:
        scored: dict[int, Scored] = {}
        if self.logprobs is not None:
            logprobs = self.logprobs.read(list(self.tops.values()))
            scored = dict(zip(self.tops, logprobs, strict=True))
        pairs = zip(self.tokens.tolist(), map(bool, self.trusted.tolist()), strict=True)
        return [SampledToken(*pair, scored.get(row)) for row, pair in enumerate(pairs)]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens of one step, lazy: evaluate `arrays`, then call `read`."""

    tokens: Any
    """``[rows]`` int32."""
    parts: list[_PartOutput]

    @staticmethod
    def of(parts: list[_PartOutput], share: Share) -> SamplerOutput:
        tokens = [part.tokens for part in parts]
        joined = tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)
        return SamplerOutput(share(joined), parts)

    def arrays(self) -> list[Any]:
        return [self.tokens, *chain(*(part.arrays() for part in self.parts))]

    def read(self) -> list[SampledToken]:
        """Return all rows; waits for the device."""
        return [*chain(*(part.read() for part in self.parts))]


@dataclass(slots=True)
class _Part:
    """Rows of a step that are drawn at once, with derived settings."""

    keys: tuple[Hashable, ...]
    rows: tuple[SamplerRow, ...]
    sampling: BatchSampling
    edits: Edits
    tops: dict[int, int]
    with_logprobs: Any
    """Rows that request logprobs, as an array; None if all do."""

    @staticmethod
    def of(
        keys: tuple[Hashable, ...], rows: tuple[SamplerRow, ...], counts: Counts, *, direct: bool
    ) -> _Part:
        settings = [row.settings for row in rows]
        tops = {at: one.logprobs for at, one in enumerate(settings) if one.logprobs is not None}
        return _Part(
            keys,
            rows,
            BatchSampling.of(
                [one.sampling for one in settings],
                [one.choice for one in settings],
                direct=direct,
            ),
            Edits.of(rows, keys, counts),
            tops,
            None if len(tops) == len(rows) else mx.array(list(tops), dtype=mx.int32),
        )

    def draw(
        self,
        logits: Any,
        positions: Sequence[int],
        counts: Counts,
        masks: Any,
        direct: DirectDraws | None,
    ) -> _PartOutput:
        if self.edits.stale:
            self.edits = Edits.of(self.rows, self.keys, counts)
        edited = self.edits.apply(logits, counts)
        if direct is None:
            allowed = edited if masks is None else masking.masked(edited, masks)
            tokens, valid = sample(allowed, self.sampling, positions), None
        else:
            tokens, valid = direct.draw(edited, masks, self.sampling, positions)
        if valid is None or edited is not logits:
            valid = finite_and_varied(logits)
        self.edits.count(tokens, counts)
        for row in self.rows:
            row.drawn += 1
        scores = None
        if self.tops:
            index = self.with_logprobs
            scored_logits = logits if index is None else logits[index]
            scored_tokens = tokens if index is None else tokens[index]
            scores = score(scored_logits, scored_tokens, top=any(self.tops.values()))
        return _PartOutput(tokens, valid, scores, self.tops)


class Sampler:
    """Samples the rows of an engine: `add` rows, `draw` any of them, `remove` them."""

    def __init__(
        self, vocabulary: int, at_once: int | None = None, share: Share = lambda tokens: tokens
    ) -> None:
        """``at_once``: maximum rows of a part; None: as many as `SAMPLED_AT_ONCE` allows.

        ``share``: sends the tokens of a step to other processes, lazily (`kvd.worker.gang`).
        """
        self._share = share
        self._direct = direct_draws.prepared(vocabulary)
        """Draws all rows by one operation; None: operations of MLX do."""
        self._rows: dict[Hashable, SamplerRow] = {}
        self._counts = Counts(vocabulary)
        self._at_once = at_once or max(1, SAMPLED_AT_ONCE // (4 * vocabulary))
        self._keys: tuple[Hashable, ...] = ()
        """Rows of the last step."""
        self._parts: list[_Part] | None = None
        """Parts of these rows; None if they must be built again."""

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
            self._parts = None

    def remove(self, key: Hashable) -> None:
        """Remove a row. Draws in flight are not affected."""
        self._counts.remove(key)
        row = self._rows.pop(key)
        if row.penalized or key in self._keys:
            self._parts = None  # a row with the same key may be added

    def restart(self, key: Hashable, prompt: Sequence[int], produced: Sequence[int]) -> None:
        """Continue a row after other tokens than those that were drawn."""
        settings = self._rows[key].settings
        self.remove(key)
        self.add(key, settings, prompt, produced)

    def draw(
        self,
        logits: Any,
        keys: Sequence[Hashable],
        positions: Sequence[int],
        masks: Any = None,
    ) -> SamplerOutput:
        """Draw the next token of these rows, lazily.

        ``logits``: unedited, ``[rows, vocabulary]``. ``positions``: position of the token to draw
        in each row. A resumed row must count positions as before. ``masks``: a bit for each token
        that may be drawn, ``[rows, bytes]`` uint8, the lowest bit first; absent: all tokens.
        """
        if self._parts is None or self._keys != tuple(keys):
            self._keys = tuple(keys)
            self._parts = self._cut(self._keys)
        self._counts.extend()
        if len(self._parts) == 1:  # without slices, which are operations of their own
            only = self._parts[0].draw(logits, positions, self._counts, masks, self._direct)
            return SamplerOutput.of([only], self._share)
        drawn: list[_PartOutput] = []
        start = 0
        for part in self._parts:
            end = start + len(part.keys)
            own = logits[start:end]
            if drawn:  # the previous part's memory is free before this part needs any
                (own,) = mx.depends([own], drawn[-1].arrays())
            allowed = None if masks is None else masks[start:end]
            given = own, positions[start:end], self._counts, allowed
            drawn.append(part.draw(*given, self._direct))
            start = end
        return SamplerOutput.of(drawn, self._share)

    def _cut(self, keys: tuple[Hashable, ...]) -> list[_Part]:
        starts = range(0, len(keys), self._at_once)
        groups = [keys[start : start + self._at_once] for start in starts]
        return [
            _Part.of(
                group,
                tuple(self._rows[key] for key in group),
                self._counts,
                direct=self._direct is not None,
            )
            for group in groups
        ]


def compile_modules() -> None:
    """Let MLX compile what sampling settings need on CUDA: two modules, of several seconds each.

    They are stored with those of the load, so only a machine's first load takes that time, and no
    request does. Batches of rows with different settings may need others.
    """
    counts = Counts(2)
    counts.add(0, [0], [1])
    counts.extend()
    mx.eval(pick(mx.zeros((1, 2)), mx.zeros((1, 1), mx.int32)), counts.drawn, counts.prompted)
