"""Messages between daemon and worker, as msgpack frames over a socketpair.

The daemon sends commands and the worker sends reports. The end of the stream means the peer's
death, in both directions. A worker never waits for the daemon: it merges reports that it has not
sent yet (`kvd.worker.process.outbox`). Reports may be late, but lose no content.
"""

from __future__ import annotations

from typing import Literal

from protocol import fields
from protocol.cache_outcome import RowCached
from protocol.embedding import EmbeddingsMode, EmbedOptions
from protocol.errors import ErrorInfo
from protocol.fields import Choice, Count, TokenId
from protocol.kv import BitsMode, KVSpec
from protocol.messages import FinishReason
from protocol.parts import PartStart
from protocol.resume import ChoiceProgress
from protocol.segments import SegmentInfo
from protocol.tools import ChatOptions, Grammar
from protocol.types import (
    ChatMessage,
    ModelInfo,
    Reclaimable,
    Sampling,
    TimeSlicesMode,
    TokenLogprob,
    Usage,
    WorkerStats,
)
from protocol.worker_base import CommandBase, ReportBase, RowReportBase

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""More than a client may send (`protocol.messages.MAX_FRAME_BYTES`): a prompt fits in a command."""

OVER_MEMORY_LIMIT = 71
"""Exit status of a worker that ended itself because it held more memory than it may."""


class LoadModel(CommandBase, tag="load", frozen=True, kw_only=True):
    """First command: load this model."""

    source: str
    """Embedded name, absolute folder or Hub id."""
    kv: KVSpec = KVSpec()
    max_rows: int = 32
    """Maximum rows in one decode step."""
    prefill_chunk: int = 256
    """Prompt tokens of a chunk, a multiple of 64. Affects outputs (`prefill_order`)."""
    lone_chunk: int | None = None
    """Replaces `prefill_chunk` if passes of the model take only one chunk; None: it does not."""
    attention_scratch: int = 256 * 1024 * 1024
    """Bytes that one dequantized layer may take in prefill."""
    max_context: int | None = None
    ranks: fields.Ranks = 1
    """Processes that share the model; the leader gets all commands."""
    prefix_bytes: int = 256 * 1024 * 1024
    """Bytes for the prefix cache if ``kv`` does not set them."""
    swap_folder: str | None = None
    """Folder for this worker's preempted rows, emptied at load; absent: no swapping."""
    swap_bytes: int = 0
    segments_folder: str | None = None
    """Folder of the machine's prefix store; absent: prefixes end with the worker."""
    prefix_store_on: bool = True
    """Whether the store has a limit now. Otherwise the first `SegmentsChanged` follows later."""
    key_file: str | None = None
    """File with the segments' key; absent: neither segments nor swapped rows are encrypted."""
    time_slices: TimeSlicesMode = "auto"
    embeddings: EmbeddingsMode = "auto"
    bits_by_layer: BitsMode = "auto"


class Submit(CommandBase, tag="submit", frozen=True, kw_only=True):
    """Run a request."""

    rid: str
    """Unique during the worker's life."""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tokens: list[int] | None = None
    chat: ChatOptions = ChatOptions()
    grammar: Grammar | None = None
    embed: EmbedOptions | None = None
    """Return an embedding of the prompt instead of a completion."""
    sampling: Sampling
    """Sampling settings; the seed is always set."""
    max_tokens: int | None = None
    n: fields.Choices = 1
    stop: list[str] = []
    stop_tokens: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    """Seconds left until the deadline, at the time of sending."""
    prefix_salt: str | None = None
    resume: list[ChoiceProgress] = []
    """Progress of each choice after a worker's death; empty: nothing was sent yet."""
    prompt_reported: int = 0
    """Tokens of the prompt whose logprobs were sent already."""
    levels_reported: list[int] = []
    """Precision levels at which the tokens in ``resume`` were generated, in order."""


class Tokenize(CommandBase, tag="tokenize", frozen=True, kw_only=True):
    """Tokenize a text between two steps; answered by `Tokenized`."""

    seq: int
    """Number that the answer repeats."""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat: ChatOptions = ChatOptions()
    limit: int = 0
    texts: bool = False


class CancelRow(CommandBase, tag="cancel", frozen=True, kw_only=True):
    """Cancel a request within a step; it reports ``finished`` with reason ``cancelled``."""

    rid: str


class Grant(CommandBase, tag="grant", frozen=True, kw_only=True):
    """The bytes that the worker may hold from now on; answers the memory request ``seq``.

    Seq 0 answers no request: it reports a new `limit_bytes`, and `total_bytes` is unchanged.
    """

    seq: int
    total_bytes: int
    granted: bool
    """Whether the request was granted; if not, `total_bytes` repeats the previous grant."""
    available_bytes: int = 0
    """Bytes of the budget that were free at the decision."""
    limit_bytes: int = 0
    """Maximum that this model could get: the budget without what other pinned models hold."""
    budget_bytes: int = 0
    """The whole budget; 0 with seq 0."""
    reason: str = ""
    """Why a load is refused: what holds the rest of the budget."""
    host_bytes: int = 0
    """Bytes that a refused load needs of the host's memory, if that is short and the device has its
    own. `available_bytes` are bytes of the host's memory then."""


ReclaimMethod = Literal["spare", "prefixes", "precision", "preempt"]
"""Methods by which a worker gives memory back, cheapest first (`protocol.types.Reclaimable`)."""


class Reclaim(CommandBase, tag="reclaim", frozen=True, kw_only=True):
    """Give back at least ``wanted_bytes`` by this method, in pieces between steps.

    The worker gives the bytes back with `MemoryRequested` reports of smaller totals, and ends the
    command with `Reclaimed`. It carries out one `Reclaim` at a time.
    """

    seq: int
    method: ReclaimMethod
    wanted_bytes: int
    level: int = 0
    """For ``precision``: the level to which existing rows are lowered, as many as needed; new rows
    start at it too, until the next `StartLevel`."""


class StartLevel(CommandBase, tag="start_level", frozen=True, kw_only=True):
    """Set the precision level of new rows; 0 means that pressure is over."""

    level: int


class TimeSlice(CommandBase, tag="time_slice", frozen=True, kw_only=True):
    """When the worker may compute; replaces the previous command."""

    seq: int
    slice_s: float | None
    """Seconds from now, then `TimeSliceOver`; absent: no limit; 0: wait for the next slice."""


class SegmentsChanged(CommandBase, tag="segments_changed", frozen=True, kw_only=True):
    """Segments of the worker's space that exist, or no longer exist, since the last command.

    Once the store is on, the first ones list all. A list may be stale.
    """

    added: list[SegmentInfo] = []
    removed: list[bytes] = []


class SegmentAllowed(CommandBase, tag="segment_allowed", frozen=True, kw_only=True):
    """Answers `SegmentOffered`: whether the worker may write the segment now."""

    key: bytes
    allowed: bool


class Stop(CommandBase, tag="stop", frozen=True, kw_only=True):
    """Exit with status 0, without finishing rows."""

    write_s: float = 0.0
    """Seconds that the worker may first write prefixes; 0: it exits at once."""


SegmentCommand = SegmentsChanged | SegmentAllowed
Command = (
    LoadModel
    | Submit
    | Tokenize
    | CancelRow
    | Grant
    | Reclaim
    | StartLevel
    | TimeSlice
    | SegmentCommand
    | Stop
)


class Started(ReportBase, tag="started", frozen=True, kw_only=True):
    """First report: the process runs."""

    pid: int
    mlx: str = ""
    mlx_lm: str = ""


class Progress(ReportBase, tag="progress", frozen=True, kw_only=True):
    """Progress of the load; also serves as a heartbeat."""

    stage: str
    fraction: float


class Ready(ReportBase, tag="ready", frozen=True, kw_only=True):
    """The model is loaded."""

    info: ModelInfo


class LoadFailed(ReportBase, tag="load_failed", frozen=True, kw_only=True):
    """The model cannot be loaded; the worker exits with status 0 after this."""

    error: ErrorInfo


class MemoryRequested(ReportBase, tag="memory_requested", frozen=True, kw_only=True):
    """The worker asks to hold ``total_bytes``; a smaller total than before gives bytes back."""

    seq: int
    total_bytes: int
    reason: str
    reclaimable: Reclaimable = Reclaimable()
    resuming: bool = False
    """Whether the memory is for resuming a preempted request. No rows are preempted to free it."""


class Reclaimed(ReportBase, tag="reclaimed", frozen=True, kw_only=True):
    """A `Reclaim` is over; an earlier `MemoryRequested` gave the freed bytes back."""

    seq: int
    freed_bytes: int
    exhausted: bool
    """Whether this method can free nothing more now."""


class RowQueued(RowReportBase, tag="queued", frozen=True, kw_only=True):
    """The request waits for a place or for memory; ``position`` replaces the previous one."""

    position: Count


class RowAdmitted(RowReportBase, tag="admitted", frozen=True, kw_only=True):
    """The request has its place and its memory; its prefill begins."""


PreemptionMode = Literal["memory", "disk", "recompute"]
"""How a preempted row's keys and values are kept: in memory, in a file, or not at all."""


class RowPreempted(RowReportBase, tag="preempted", frozen=True, kw_only=True):
    """The request gave its memory back and resumes later without loss."""

    nbytes: int
    where: PreemptionMode


class RowResumed(RowReportBase, tag="resumed", frozen=True, kw_only=True):
    """The request continues."""


class TimeSliceRequested(ReportBase, tag="time_slice_requested", frozen=True, kw_only=True):
    """The worker has work, and has begun it unless the last `TimeSlice` forbids that.

    Sent again when prefill work begins or ends, and after a long step without a time limit.
    """

    step_s: float | None = None
    """Seconds of one step while no other worker computes; absent: unknown."""


class TimeSliceOver(ReportBase, tag="time_slice_over", frozen=True, kw_only=True):
    """The time slice ``seq`` is over."""

    seq: int
    used_s: float
    """Seconds used since the slice began, plus those of the step that the last `left_s` named."""
    more: bool
    """Whether work is left; if not, the next report about time slices is `TimeSliceRequested`."""
    step_s: float | None = None
    """See `TimeSliceRequested`."""
    left_s: float = 0.0
    """Estimated seconds of one more step after this report; its time counts in the next slice."""


class Tokenized(ReportBase, tag="tokenized", frozen=True, kw_only=True):
    """Answers `Tokenize`."""

    seq: int
    count: Count = 0
    tokens: list[TokenId] = []
    texts: list[str] = []
    error: ErrorInfo | None = None


class RowAccepted(RowReportBase, tag="accepted", frozen=True, kw_only=True):
    """The request is tokenized and fits; it runs or waits."""

    prompt_tokens: Count


class RowTokens(RowReportBase, tag="tokens", frozen=True, kw_only=True):
    """New tokens of one choice; tokens of several steps at one level may be merged."""

    index: Count
    tokens: list[TokenId]
    text: str
    choice: Choice = 0
    parts: list[PartStart] = []
    logprobs: list[TokenLogprob] | None = None
    level: Count = 0
    """Precision level of the request when the tokens were generated."""


class RowNote(RowReportBase, tag="note", frozen=True, kw_only=True):
    """A text that looks like a tool call was sent as text; ``reason`` is for the event log."""

    reason: str


class RowPrompt(RowReportBase, tag="prompt", frozen=True, kw_only=True):
    """Logprobs of a part of the prompt; sent before the first tokens."""

    index: Count
    logprobs: list[TokenLogprob]


class ChoiceFinished(RowReportBase, tag="choice", frozen=True, kw_only=True):
    """One of several choices ended. The report of the last one contains the request's usage."""

    choice: Choice
    reason: FinishReason
    usage: Usage | None = None


class RowFinished(RowReportBase, tag="finished", frozen=True, kw_only=True):
    """The request ended, with all its choices."""

    reason: FinishReason
    usage: Usage
    stop_text: str = ""
    embedding: bytes | None = None


class RowFailed(RowReportBase, tag="failed", frozen=True, kw_only=True):
    """This request failed; others continue."""

    error: ErrorInfo


Phase = Literal["idle", "tokenize", "prefill", "decode", "flush", "pools"]
"""What a loaded worker is doing between two reports:

* ``idle``: waiting for a command, a grant, a time slice or a deadline;
* ``tokenize``: tokenizing a new request;
* ``prefill``: prefilling a chunk of one or several prompts;
* ``decode``: launching a step, or waiting for its tokens;
* ``flush``: writing full pages into the pools;
* ``pools``: growing or shrinking pools, stepping pages down, or reading pages back.
"""


class PhaseChanged(ReportBase, tag="phase", frozen=True, kw_only=True):
    """The worker is about to begin this phase.

    A repeat of the last reported phase is reported only once in a few seconds. Each phase has its
    own timeout (`actors.machines.watchdog.WatchdogTimeouts`).
    """

    phase: Phase


class SegmentsOpened(ReportBase, tag="segments_opened", frozen=True, kw_only=True):
    """The worker can read and write segments of this space; answered by `SegmentsChanged`."""

    space: bytes
    """Digest (16 bytes) of weights, KV schemes, layout, chunk and format, whatever the names."""


class SegmentOffered(ReportBase, tag="segment_offered", frozen=True, kw_only=True):
    """The worker would write this segment; answered by `SegmentAllowed`."""

    segment: SegmentInfo
    hits: int = 0
    """How often a prompt has continued from this prefix in memory."""


class SegmentWritten(ReportBase, tag="segment_written", frozen=True, kw_only=True):
    """An allowed segment is on disk, complete, under its final name."""

    segment: SegmentInfo
    seconds: float


class SegmentAbandoned(ReportBase, tag="segment_abandoned", frozen=True, kw_only=True):
    """An allowed segment was not written, and its temporary file is deleted."""

    key: bytes
    reason: str
    nbytes: int = 0
    """Bytes that were written before."""


class SegmentUsed(ReportBase, tag="segment_used", frozen=True, kw_only=True):
    """A prompt continued from this segment instead of being prefilled."""

    key: bytes
    tokens: int
    """Tokens that were read, those of its bases included."""
    seconds: float
    """Seconds of I/O or of copies into the pools, whichever took longer, without others' steps."""
    prefill_s: float
    """Seconds that prefill would have taken at this worker's measured rate."""
    nbytes: int = 0
    """Bytes that were read."""


class SegmentDamaged(ReportBase, tag="segment_damaged", frozen=True, kw_only=True):
    """A segment's file is missing, damaged or not what its name says; it must not be used again."""

    key: bytes
    reason: str


class Stats(ReportBase, tag="stats", frozen=True, kw_only=True):
    """Counters; also serve as a heartbeat."""

    stats: WorkerStats


RowReport = (
    RowAccepted
    | RowQueued
    | RowAdmitted
    | RowCached
    | RowPreempted
    | RowResumed
    | RowPrompt
    | RowTokens
    | RowNote
    | ChoiceFinished
    | RowFinished
    | RowFailed
)
SegmentReport = (
    SegmentsOpened
    | SegmentOffered
    | SegmentWritten
    | SegmentAbandoned
    | SegmentUsed
    | SegmentDamaged
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
    | SegmentReport
    | PhaseChanged
    | Stats
)
