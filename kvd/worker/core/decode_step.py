"""One decode step in flight: the rows that it advances, and the lazy draw of their next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.core.request import Completion, Key
from kvd.worker.sampling.sampler import Sampler, SamplerOutput
from kvd.worker.serving.runner import Row
from kvd.worker.serving.step_inputs import KNOWN, StepInputs


@dataclass(eq=False)
class DecodeStep:
    """A decode step that was launched and not read yet."""

    drawing: list[Completion]
    replaying: list[Completion]
    """Completions whose next token is known."""
    logits: mx.array | None
    """Logits of the rows that draw, ``[rows, vocabulary]``, lazy; of all rows if none draws. None
    once the tokens are drawn, to free their memory."""
    lengths: list[int]
    """Tokens of these rows: the positions that are drawn."""
    positions: dict[Key, int]
    """Positions in ``drawing`` by completion."""
    levels: dict[str, int]
    """Precision level at which the step was launched, by request id."""
    draw: SamplerOutput | None = None
    """None if no completion draws, and until `draw_tokens`."""

    @staticmethod
    def of(
        logits: mx.array, completions: list[Completion], rows: list[Row], levels: dict[str, int]
    ) -> DecodeStep:
        """Return a step that has not drawn; ``logits``: ``[rows, vocabulary]``."""
        drawing = [at for at, one in enumerate(completions) if one.launched >= one.known]
        replaying = [one for one in completions if one.launched < one.known]
        if drawing and replaying:
            logits = logits[mx.array(drawing)]
        drawn = [completions[at] for at in drawing]
        lengths = [rows[at].length for at in drawing]
        positions = {one.key: at for at, one in enumerate(drawn)}
        return DecodeStep(drawn, replaying, logits, lengths, positions, levels)

    @property
    def arrays(self) -> list[mx.array]:
        """Lazy results; evaluate them together with the cache's arrays."""
        if self.draw is not None:
            return self.draw.arrays()
        return [] if self.logits is None else [self.logits]

    @property
    def has_grammars(self) -> bool:
        """Whether a row's next token depends on the text of the previous one."""
        return any(one.matcher is not None for one in self.drawing)

    def draws(self, completion: Completion) -> bool:
        return completion.key in self.positions

    def includes(self, completion: Completion) -> bool:
        return self.draws(completion) or completion in self.replaying

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
        return StepInputs(known, [KNOWN] * len(known), draws, None)
    places = [
        KNOWN if one.launched <= len(one.tokens) else previous.positions.get(one.key, KNOWN)
        for one in completions
    ]
    return StepInputs(known, places, draws, previous.draw.tokens)
