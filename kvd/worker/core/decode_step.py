"""One decode step in flight: the rows that it advances, and the lazy draw of their next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.core.request import Completion, Key
from kvd.worker.sampling.sampler import Sampler, SamplerOutput
from kvd.worker.serving.runner import Row


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """A decode step that was launched and not read yet."""

    drawing: list[Completion]
    replaying: list[Completion]
    """Completions whose next token is known."""
    draw: SamplerOutput | None
    """None if no completion draws."""
    positions: dict[Key, int]
    """Positions in ``draw`` by completion."""
    levels: dict[str, int]
    """Precision level at which the step was launched, by request id."""
    arrays: list[mx.array]
    """Lazy results; evaluate them together with the cache's arrays."""

    def includes(self, completion: Completion) -> bool:
        return completion.key in self.positions or completion in self.replaying


def draw_tokens(
    sampler: Sampler,
    logits: mx.array,
    completions: list[Completion],
    rows: list[Row],
    levels: dict[str, int],
) -> DecodeStep:
    """Draw the next token of each row lazily, except for rows whose next token is known."""
    drawing = [at for at, one in enumerate(completions) if one.launched >= one.known]
    replaying = [one for one in completions if one.launched < one.known]
    if not drawing:
        return DecodeStep([], replaying, None, {}, levels, [logits])
    if replaying:
        logits = logits[mx.array(drawing)]
        completions = [completions[at] for at in drawing]
        rows = [rows[at] for at in drawing]
    keys = [completion.key for completion in completions]
    draw = sampler.draw(logits, keys, [row.length for row in rows])
    positions = {key: at for at, key in enumerate(keys)}
    return DecodeStep(completions, replaying, draw, positions, levels, draw.arrays())


def input_tokens(previous: DecodeStep | None, completions: list[Completion]) -> mx.array:
    """Return the input of each row, ``[rows]`` int32: a token of the previous step, or a known one.

    ``previous``: the step in flight, whose tokens need not be evaluated yet.
    """
    known = [one.next_input for one in completions]
    if previous is None or previous.draw is None:
        return mx.array(known, mx.int32)
    tokens: mx.array = previous.draw.tokens
    has_known = any(one.launched <= len(one.tokens) for one in completions)
    if completions == previous.drawing and not has_known:
        return tokens
    size = len(previous.drawing)
    index = [
        size + at if one.launched <= len(one.tokens) else previous.positions.get(one.key, size + at)
        for at, one in enumerate(completions)
    ]
    return mx.concatenate([tokens, mx.array(known, mx.int32)])[mx.array(index)]
