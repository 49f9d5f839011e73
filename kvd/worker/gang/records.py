"""What a gang's leader sends to its followers: calls that change the cache or run the model.

A follower knows no requests. It applies the records in order, so that its rows, pages and tails
are those of the leader. Rows and snapshots have numbers, which the leader gives. Work that the
leader limits by time is counted in ticks instead (`kvd.worker.gang.ticks`).
"""

from __future__ import annotations

import msgspec

from protocol.worker import LoadModel


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all records."""


class Load(_Record, frozen=True):
    """First record: load a part of this model."""

    command: LoadModel
    path: str
    """Folder of the model, which the leader has resolved."""
    vocab_size: int
    native: bool
    """Whether all ranks use the native library."""


class NewRow(_Record, frozen=True):
    """Create an empty row at a precision level (`ModelCache.new_row`)."""

    row: int
    level: int
    coming: int


class Restore(_Record, frozen=True):
    """Create a row with a snapshot's content (`ModelCache.restore`)."""

    row: int
    snapshot: int
    coming: int


class Free(_Record, frozen=True):
    """Free a row (`ModelCache.free`)."""

    row: int
    clean: bool


class Take(_Record, frozen=True):
    """Take a snapshot of a row, as it was at a length of ``tokens``."""

    snapshot: int
    row: int
    tokens: int


class Drop(_Record, frozen=True):
    """Drop a snapshot."""

    snapshot: int


class Decode(_Record, frozen=True):
    """Run one token of each row (`StepInputs`), and take over the tokens that the leader draws."""

    rows: list[int]
    known: list[int]
    places: list[int]
    draws: int


class Prefill(_Record, frozen=True):
    """Prefill chunks in one pass (`Runner.prefill_pass`)."""

    rows: list[int]
    chunks: list[list[int]]
    later: int


class PrefillHidden(_Record, frozen=True):
    """Prefill chunks, and compute their hidden states."""

    rows: list[int]
    chunks: list[list[int]]


class Score(_Record, frozen=True):
    """Prefill a chunk of one row, whose logits `ScoreNext` computes."""

    row: int
    tokens: list[int]


class ScoreNext(_Record, frozen=True):
    """Compute the next part of the chunk's logits: a divided head is a collective."""


class Flush(_Record, frozen=True):
    """Write the pages that are due (`ModelCache.flush`)."""


class MakeRoom(_Record, frozen=True):
    """Grow pools ahead of need."""

    ticks: int


class MakeIdleRoom(_Record, frozen=True):
    """Grow a piece of the pools (`ModelCache.make_idle_room`)."""

    pages: int


class Compact(_Record, frozen=True):
    """Cut pools to the pages in use (`ModelCache.compact`)."""

    pages: int


class CutTails(_Record, frozen=True):
    """Free the tails of rows that ended."""


class Shrink(_Record, frozen=True):
    """Free all memory but room for some pages (`ModelCache.shrink`)."""

    pages: int


class GiveBack(_Record, frozen=True):
    """Return freed buffers to the system."""


class StepDown(_Record, frozen=True):
    """Begin to move rows to a lower precision level; `Work` continues."""

    rows: list[int]
    level: int


class TrimPools(_Record, frozen=True):
    """Begin to cut the pools to the pages in use; `Work` continues."""


class Work(_Record, frozen=True):
    """Continue the work that was begun last."""

    ticks: int


Record = (
    Load
    | NewRow
    | Restore
    | Free
    | Take
    | Drop
    | Decode
    | Prefill
    | PrefillHidden
    | Score
    | ScoreNext
    | Flush
    | MakeRoom
    | MakeIdleRoom
    | Compact
    | CutTails
    | Shrink
    | GiveBack
    | StepDown
    | TrimPools
    | Work
)


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """A record on its way to the followers."""

    number: int
    """1 for the first record, and one more for each further one."""
    digest: int
    """State of the record's rows before it is applied (`kvd.worker.gang.digest`); 0: no rows."""
    limit_bytes: int | None
    """`ModelCache.limit_bytes` of one rank: pools grow alike on all ranks."""
    record: Record
