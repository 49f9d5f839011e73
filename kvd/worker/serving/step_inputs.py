"""The inputs of a decode step, in a form that another process can rebuild (`kvd.worker.gang`)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.sampling.largest import pick

KNOWN = -1
"""Place of an input that is a known token."""


@dataclass(frozen=True)
class StepInputs:
    """Where the input token of each row comes from."""

    known: list[int]
    """Token of each row; read only where its place is `KNOWN`."""
    places: list[int]
    """Index of each row's input in the tokens drawn by the previous step, or `KNOWN`."""
    draws: int
    """Rows whose next token the step draws."""
    drawn: mx.array | None
    """Tokens that the previous step draws, ``[rows of that step]`` int32, possibly lazy."""

    @staticmethod
    def of(known: list[int], draws: int = 0) -> StepInputs:
        """Return inputs that are all known."""
        return StepInputs(known, [KNOWN] * len(known), draws, None)

    def tokens(self) -> mx.array:
        """Return the inputs, ``[rows]`` int32."""
        known, drawn = mx.array(self.known, mx.int32), self.drawn
        if drawn is None or all(place == KNOWN for place in self.places):
            return known
        size = drawn.shape[0]
        if self.places == list(range(size)):
            return drawn
        index = [size + at if place == KNOWN else place for at, place in enumerate(self.places)]
        tokens: mx.array = pick(mx.concatenate([drawn, known]), mx.array(index))
        return tokens
