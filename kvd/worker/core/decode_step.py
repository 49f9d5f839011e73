"""One decode step in flight: the rows that it advances, and the lazy draw of their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.core.request import Completion, Key
from kvd.worker.grammar.matcher import Matcher
from kvd.worker.sampling.sampler import Sampler, SamplerOutput
from kvd.worker.serving.runner import Row
from kvd.worker.serving.step_inputs import KNOWN, StepInputs


@dataclass(eq=False)
class LateRow:
    """A row whose mask was not ready when its step drew: a later step draws its token."""

    completion: Completion
    logits: mx.array
    """``[1, vocabulary]``, lazy."""
    length: int
    level: int


@dataclass(eq=False)
class DecodeStep:
    """A decode step that was launched and not read yet."""

    drawing: list[Completion]
    passing: list[Completion]
    """Completions that it advances and does not draw: those whose next token is known, and those
    that a later step draws."""
    logits: mx.array | None
    """Logits of the rows that draw, ``[rows, vocabulary]``, lazy; of all rows if none draws. None
    once the tokens are drawn, to free their memory."""
    lengths: list[int]
    """Tokens of these rows: the positions that are drawn."""
    levels: list[int]
    """Precision levels of these rows when their step was launched."""
    positions: dict[Key, int] = field(default_factory=dict)
    """Positions in ``drawing`` by completion."""
    draw: SamplerOutput | None = None
    """None if no completion draws, and until `draw_tokens`."""
    host_tokens: mx.array | None = None
    """A copy of the drawn tokens, ``[rows]`` int32, that a thread may read. None without grammars.
    """
    advanced: bool = False
    """Whether the matchers were advanced by the drawn tokens, or a thread does so."""
    late: list[LateRow] = field(default_factory=list)
    """Rows of the step that a later one draws."""
    is_timed: bool = True
    """Whether the time until it is read measures it: the host does no other work meanwhile."""

    @staticmethod
    def of(
        logits: mx.array, completions: list[Completion], rows: list[Row], levels: dict[str, int]
    ) -> DecodeStep:
        """Return a step that has not drawn; ``logits``: ``[rows, vocabulary]``.

        ``levels``: by request id.
        """
        places = [at for at, one in enumerate(completions) if one.launched >= one.known]
        replaying = [one for one in completions if one.launched < one.known]
        if places and replaying:
            logits = logits[mx.array(places)]
        drawing = [completions[at] for at in places]
        lengths = [rows[at].length for at in places]
        step = DecodeStep(
            drawing, replaying, logits, lengths, [levels[one.key[0]] for one in drawing]
        )
        step._note_positions()
        return step

    def _note_positions(self) -> None:
        self.positions = {one.key: at for at, one in enumerate(self.drawing)}

    def replace_late(self, late: Sequence[int], ready: Sequence[LateRow]) -> None:
        """Leave the rows at the places ``late`` to a later step; draw ``ready`` ones of earlier."""
        if not (late or ready):
            return
        logits = self.logits
        if late:
            assert logits is not None
            for at in late:  # copies, which do not keep the logits of other rows
                one = LateRow(
                    self.drawing[at], logits[mx.array([at])], self.lengths[at], self.levels[at]
                )
                self.late.append(one)
                self.passing.append(one.completion)
            kept = [at for at in range(len(self.drawing)) if at not in late]
            self.drawing = [self.drawing[at] for at in kept]
            self.lengths = [self.lengths[at] for at in kept]
            self.levels = [self.levels[at] for at in kept]
            logits = logits[mx.array(kept)] if kept else None
        if ready:
            parts = [] if logits is None or not self.drawing else [logits]
            logits = mx.concatenate([*parts, *(one.logits for one in ready)])
            self.drawing = [*self.drawing, *(one.completion for one in ready)]
            self.lengths = [*self.lengths, *(one.length for one in ready)]
            self.levels = [*self.levels, *(one.level for one in ready)]
        self.logits = logits
        self._note_positions()

    @property
    def arrays(self) -> list[mx.array]:
        """Lazy results; evaluate them together with the cache's arrays."""
        held = [one.logits for one in self.late]
        if self.draw is not None:
            copy = [] if self.host_tokens is None else [self.host_tokens]
            return [*self.draw.arrays(), *copy, *held]
        return held if self.logits is None else [self.logits, *held]

    @property
    def has_grammars(self) -> bool:
        """Whether a row's next token depends on the text of the previous one."""
        return any(one.matcher is not None for one in self.drawing)

    @property
    def lent(self) -> list[Matcher]:
        """Matchers of rows to be drawn that threads advance. Ended rows need no mask."""
        return [
            one.matcher
            for one in self.drawing
            if one.matcher is not None and one.matcher.lent and not one.ended
        ]

    def includes(self, completion: Completion) -> bool:
        return completion.key in self.positions or completion in self.passing

    def draw_tokens(self, sampler: Sampler, masks: mx.array | None = None) -> None:
        """Draw the next token of each row lazily; ``masks``: see `Sampler.draw`."""
        if self.drawing:
            keys = [completion.key for completion in self.drawing]
            self.draw = sampler.draw(self.logits, keys, self.lengths, masks)
            self.logits = None


def step_inputs(previous: DecodeStep | None, completions: list[Completion]) -> StepInputs:
    """Return the input of each row: a token of the previous step, or a known one.

    ``previous``: the step in flight, whose tokens need not be evaluated yet.
    """
    known = [one.next_input for one in completions]
    draws = sum(one.launched >= one.known for one in completions)
    if previous is None or previous.draw is None:
        return StepInputs.of(known, draws)
    places = [
        KNOWN if one.launched <= len(one.tokens) else previous.positions.get(one.key, KNOWN)
        for one in completions
    ]
    return StepInputs(known, places, draws, previous.draw.tokens)
