"""The reply to `explain`: how much memory rows of a model would need, and how it would be freed."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.segments import PrefixSpace

Verdict = Literal["fits", "makes_room", "waits", "never"]
"""Whether the rows fit:

* ``fits``: the memory is free now;
* ``makes_room``: it is free after `Forecast.steps`;
* ``waits``: not all of it can be freed now, so requests would wait until others end;
* ``never``: the rows exceed the whole budget even at the lowest precision level.
"""


class LevelCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the rows on one precision level."""

    scheme: str
    token_bytes: float
    """Bytes by which each token makes a long row grow; 0 if a row's bytes are bounded."""
    row_bytes: int
    """Most bytes that one row reserves, when it has all its tokens."""
    start_bytes: int = 0
    """Bytes that a row with a short prompt reserves at first. It grows while it decodes."""
    total_bytes: int
    """Grant that the model needs for these rows and those that it already has."""
    max_rows: int
    """Rows that the whole budget holds without other models, up to the setting ``max_rows``."""


class ReclaimStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step that frees memory."""

    method: str
    """Reclaim method: ``spare``, ``prefixes``, ``expired``, ``precision``, ``idle`` or ``preempt``;
    see docs/operations.md."""
    model: str
    nbytes: int
    """Bytes that the step frees: at most those still missing, except that an evicted model frees
    everything."""
    level: int = 0
    """Precision level that rows step down to."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The whole forecast. Bytes are counted as in the budget.

    With several GPUs, they are the bytes of one GPU. For a model over several GPUs, that is the one
    with the least room.
    """

    model: str
    source: str
    state: str
    """State as in `status`. Without a worker: ``comes on demand`` if requests load the model, else
    ``not loaded``."""
    measured: bool
    """Whether the costs come from the worker; if not, they are estimated from the model's files."""
    context: int
    """Tokens of each row, prompt and completion together; at most the model's context."""
    rows: int
    """Number of rows that the forecast is about; at most the setting ``max_rows``."""
    weights_bytes: int
    base_bytes: int
    """Bytes held permanently: weights, scratch, interpreter and the allocator's cache."""
    idle_bytes: int
    """Bytes that the model holds without requests: `base_bytes` and its first pages."""
    levels: list[LevelCost]
    """Costs by precision level, from level 0 down."""
    level: int = 0
    """Precision level of new rows now."""
    device: int | None = None
    """Number of that GPU; absent with fewer than two."""
    budget_bytes: int
    available_bytes: int
    """Bytes of the budget that are not granted."""
    held_bytes: int
    """Bytes granted to this model now."""
    missing_bytes: int
    """Bytes needed in addition to `held_bytes` and `available_bytes`."""
    steps: list[ReclaimStep]
    """Steps that would free the missing bytes, in order."""
    shortfall_bytes: int
    """Bytes still missing after all steps."""
    verdict: Verdict
    """Whether the rows fit."""
    stored: PrefixSpace | None = None
    """What the prefix store has on disk for the model, if it has anything."""
