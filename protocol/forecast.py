"""What `explain` answers: what rows of a model would take, and what would be done to make room."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["fits", "makes_room", "waits", "never"]
"""Of the rows that were asked about:

* ``fits``: there is room now;
* ``makes_room``: there is once the steps are taken;
* ``waits``: not all of it can be freed now; requests would wait until others end;
* ``never``: not even at the lowest level with the whole budget.
"""


class LevelCost(msgspec.Struct, frozen=True, kw_only=True):
    """Those rows on one level of the ladder."""

    scheme: str
    token_bytes: float
    """Of a long row; 0 where rows are bounded."""
    row_bytes: int
    """What is reserved for one of them: its worst case."""
    total_bytes: int
    """The grant that the model needs for all of them, beside the rows that it has."""
    max_rows: int
    """How many of them the whole budget holds, with nothing else in it."""


class ReclaimStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that would be done, in this order."""

    method: str
    """``spare``, ``prefixes``, ``expired``, ``level``, ``idle`` or ``park``; docs/operations.md."""
    model: str
    nbytes: int
    """What it frees, as far as it is needed; models that are unloaded give all."""
    level: int = 0
    """That rows step down to."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Bytes are those that the budget counts."""

    model: str
    source: str
    state: str
    """As `status` says it; ``not loaded`` for one that is not there."""
    measured: bool
    """Whether the worker has told what it costs; else it is reckoned from the model's files."""
    context: int
    """Tokens of each row, prompt and completion together."""
    rows: int
    weights_bytes: int
    base_bytes: int
    """Weights, scratch, the interpreter and what an allocator keeps: for good."""
    idle_bytes: int
    """What the model holds when nobody asks it anything: the base, and its first pages."""
    levels: list[LevelCost]
    """From the top of the ladder down."""
    level: int = 0
    """Where new rows start now."""
    budget_bytes: int
    available_bytes: int
    """Granted to nobody."""
    held_bytes: int
    """Granted to this model now."""
    missing_bytes: int
    """What it would have to get beyond what is available."""
    steps: list[ReclaimStep]
    """What would make room for that."""
    shortfall_bytes: int
    """What is still lacking after all of it."""
    verdict: Verdict
