"""Daemon <-> worker: what travels as msgpack frames over the socketpair.

The daemon sends commands, the worker sends reports. The end of the stream means death, in both
directions. Reports are best effort in time, never in content: a worker never waits for the
daemon, it merges what it has not sent yet (`kvd.worker.process.outbox`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import ErrorInfo
from protocol.messages import FinishReason
from protocol.types import (
    ChatMessage,
    KVSpec,
    ModelInfo,
    Reclaimable,
    Sampling,
    TimeSlicesMode,
    TokenLogprob,
    Usage,
    WorkerStats,
)

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""Above the client's limit, since a prompt of that size must pass as a command."""


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="c", omit_defaults=True):
    pass


class LoadModel(_Command, tag="load", frozen=True, kw_only=True):
    """First command: load this model."""

    source: str
    """Embedded name, absolute folder or Hub id."""
    kv: KVSpec = KVSpec()
    max_rows: int = 32
    """The most rows in one decode step."""
    prefill_chunk: int = 256
    """C of the cut grid, in tokens, a multiple of 64: part of what decides the output."""
    attention_scratch: int = 256 * 1024 * 1024
    """Bytes that one dequantized layer may take in prefill."""
    max_context: int | None = None
    """The most tokens of prompt and completion; absent: what the model says."""
    swap_folder: str | None = None
    """Where rows are parked, this worker's own: what is in it is deleted. Absent: not on disk."""
    swap_bytes: int = 0
    """The most that all files there may hold."""
    time_slices: TimeSlicesMode = "auto"
    """Whether it takes turns with other workers; ``auto``: where there is an accelerator."""


class ChoiceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a completion was when its worker died; none of it is reported again."""

    tokens: list[int] = []
    """Sent, and fed to the model again in the steps that they came from."""
    text_bytes: int = 0
    """Of the text that was sent, in UTF-8: it may run behind the tokens."""
    reason: FinishReason | None = None
    """Told already; absent: it goes on."""


class Submit(_Command, tag="submit", frozen=True, kw_only=True):
    """Run a request. ``rid`` is the daemon's own, unique for the worker's life."""

    rid: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tokens: list[int] | None = None
    sampling: Sampling
    """With a seed, always."""
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] = []
    stop_tokens: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    """What is left of it when this is sent."""
    prefix_salt: str | None = None
    resume: list[ChoiceProgress] = []
    """One for each choice, after a worker's death; empty: nothing was sent yet."""
    prompt_reported: int = 0
    """Tokens of the prompt whose logprobs were sent already."""


class Tokenize(_Command, tag="tokenize", frozen=True, kw_only=True):
    """Tell the tokens of a text, between two steps; answered by `Tokenized`."""

    seq: int
    """The daemon's own, to know the answer by."""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    limit: int = 0
    """Tell so many of them."""
    texts: bool = False


class CancelRow(_Command, tag="cancel", frozen=True, kw_only=True):
    """End a request within a step; it reports ``finished`` with reason ``cancelled``."""

    rid: str


class Grant(_Command, tag="grant", frozen=True, kw_only=True):
    """The worker may hold this many bytes from now on; answers the request ``seq``.

    Seq 0 answers none: the budget changed, and the total did not.
    """

    seq: int
    total_bytes: int
    granted: bool
    """False: the total stays what it was (and is repeated here)."""
    available_bytes: int = 0
    """What the budget had left when it said so."""
    budget_bytes: int = 0
    """What this model could have at most: all but what pinned others keep."""
    reason: str = ""
    """Of a load that is refused: who holds the rest."""


ReclaimMethod = Literal["spare", "prefixes", "precision", "preempt"]
"""By what means memory is given back, the cheapest first (`protocol.types.Offer`)."""


class Reclaim(_Command, tag="reclaim", frozen=True, kw_only=True):
    """Give back at least so much by this means, in slices beside decoding.

    A smaller `MemoryRequested` says what it gave; `Reclaimed` that it is over. At most one runs.
    """

    seq: int
    """The daemon's own, to know the answer by."""
    method: ReclaimMethod
    wanted_bytes: int
    level: int = 0
    """For ``level``: where all rows go, and where new ones start until `StartLevel`."""


class StartLevel(_Command, tag="start_level", frozen=True, kw_only=True):
    """New rows start at this level of the ladder; 0, the top: pressure is over."""

    level: int


class TimeSlice(_Command, tag="time_slice", frozen=True, kw_only=True):
    """When the worker may compute; the newest word holds."""

    seq: int
    slice_s: float | None
    """So long from now on, then `TimeSliceOver`; absent: as it likes; 0: not before a turn."""


class Stop(_Command, tag="stop", frozen=True, kw_only=True):
    """Exit 0; ``drain`` finishes the rows first."""

    drain: bool = True


Command = (
    LoadModel | Submit | Tokenize | CancelRow | Grant | Reclaim | StartLevel | TimeSlice | Stop
)


class _Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="r", omit_defaults=True):
    pass


class Started(_Report, tag="started", frozen=True, kw_only=True):
    """First report: the process runs."""

    pid: int
    mlx: str = ""
    mlx_lm: str = ""


class Progress(_Report, tag="progress", frozen=True, kw_only=True):
    """How far the load is; also a sign of life while loading."""

    stage: str
    fraction: float


class Ready(_Report, tag="ready", frozen=True, kw_only=True):
    """The model answers."""

    info: ModelInfo


class LoadFailed(_Report, tag="load_failed", frozen=True, kw_only=True):
    """It never will; the worker exits 0 after this."""

    error: ErrorInfo


class MemoryRequested(_Report, tag="memory_requested", frozen=True, kw_only=True):
    """The worker wants to hold ``total_bytes`` in all (less than now gives memory back)."""

    seq: int
    total_bytes: int
    reason: str
    reclaimable: Reclaimable = Reclaimable()
    """What it could give back when it asked."""
    resuming: bool = False
    """It is for a row that was parked: nobody else shall be parked for it."""


class Reclaimed(_Report, tag="reclaimed", frozen=True, kw_only=True):
    """A `Reclaim` is over; what it freed went back by the `MemoryRequested` before this."""

    seq: int
    freed_bytes: int
    exhausted: bool
    """This means has no more to give now."""


class RowQueued(_Report, tag="queued", frozen=True, kw_only=True):
    """The request waits for a place or for memory; the newest position counts."""

    rid: str
    position: int
    """1: it is next."""


class RowAdmitted(_Report, tag="admitted", frozen=True, kw_only=True):
    """The request has its memory and its place: from now on its prompt is read."""

    rid: str


PreemptionMode = Literal["memory", "disk", "recompute"]
"""Where a parked row's keys and values are until it goes on."""


class RowPreempted(_Report, tag="preempted", frozen=True, kw_only=True):
    """The request gave its memory back and waits to go on; nothing of it is lost."""

    rid: str
    nbytes: int
    """What it gave back."""
    where: PreemptionMode


class RowResumed(_Report, tag="resumed", frozen=True, kw_only=True):
    """The request goes on."""

    rid: str


LONG_STEP_S = 0.05
"""A slice of an accelerator's time at weight 1. Workers whose steps together take no longer need no
turns: nobody waits for another's step as long as for its slice."""


class TimeSliceRequested(_Report, tag="time_slice_requested", frozen=True, kw_only=True):
    """There is work from now on; begun already, unless the last `Turn` forbids it.

    Said again when it becomes of another kind: prompts to read, or none any more.
    """

    step_s: float | None = None
    """What a step of it takes while nobody else computes; absent: not known yet."""


class TimeSliceOver(_Report, tag="time_slice_over", frozen=True, kw_only=True):
    """The turn ``seq`` is over."""

    seq: int
    used_s: float
    """Of it, up to the end of its last step."""
    more: bool
    """There is work left; without, the next word about turns is `TimeSliceRequested`."""
    step_s: float | None = None
    """As in `TimeSliceRequested`."""
    left_s: float = 0.0
    """What a last step will probably take that is told with the next turn's end."""


class Tokenized(_Report, tag="tokenized", frozen=True, kw_only=True):
    """Answers `Tokenize`."""

    seq: int
    count: int = 0
    tokens: list[int] = []
    texts: list[str] = []
    error: ErrorInfo | None = None
    """Of a text that has no tokens."""


class RowAccepted(_Report, tag="accepted", frozen=True, kw_only=True):
    """The request is tokenized and fits; it runs or waits for a place."""

    rid: str
    prompt_tokens: int


class RowTokens(_Report, tag="tokens", frozen=True, kw_only=True):
    """New tokens of one request; those of several steps may come as one."""

    rid: str
    index: int
    tokens: list[int]
    text: str
    choice: int = 0
    logprobs: list[TokenLogprob] | None = None
    """One for each token, if the request asks for them."""


class RowPrompt(_Report, tag="prompt", frozen=True, kw_only=True):
    """How likely a stretch of the prompt was; before the first tokens."""

    rid: str
    index: int
    logprobs: list[TokenLogprob]


class ChoiceFinished(_Report, tag="choice", frozen=True, kw_only=True):
    """One of n > 1 completions is over; others may still run."""

    rid: str
    choice: int
    reason: FinishReason


class RowFinished(_Report, tag="finished", frozen=True, kw_only=True):
    """The request is over, with all its completions."""

    rid: str
    reason: FinishReason
    usage: Usage


class RowFailed(_Report, tag="failed", frozen=True, kw_only=True):
    """The request, alone, failed."""

    rid: str
    error: ErrorInfo


Phase = Literal["idle", "tokenize", "prefill", "decode", "flush", "pools"]
"""What a worker that has loaded its model does between two signs of life:

* ``idle``: it waits, for a command, a grant, a turn or a deadline;
* ``tokenize``: it takes a request;
* ``prefill``: it reads a chunk of a prompt, or of several;
* ``decode``: it launches a step, or waits for its tokens;
* ``flush``: it writes full pages into the pools;
* ``pools``: it makes room: pools that grow or shrink, pages that go down the ladder or come back.
"""


class PhaseChanged(_Report, tag="phase", frozen=True, kw_only=True):
    """The worker is in this phase from now on; told when it changes, and before it begins.

    Each phase has its own deadline (`actors.machines.watchdog.WatchdogTimeouts`).
    """

    phase: Phase


class Stats(_Report, tag="stats", frozen=True, kw_only=True):
    """Counters; the heartbeat."""

    stats: WorkerStats


RowReport = (
    RowAccepted
    | RowQueued
    | RowAdmitted
    | RowPreempted
    | RowResumed
    | RowPrompt
    | RowTokens
    | ChoiceFinished
    | RowFinished
    | RowFailed
)
Report = (
    Started
    | Progress
    | Ready
    | LoadFailed
    | MemoryRequested
    | Reclaimed
    | TimeSliceRequested
    | TimeSliceOver
    | Tokenized
    | RowReport
    | PhaseChanged
    | Stats
)
