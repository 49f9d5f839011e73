"""Values in both protocols: client to daemon, and daemon to worker.

Bytes are integers, durations are in seconds (``_s``), and token positions start at zero.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.costs import Costs
from protocol.device import DeviceStatus
from protocol.embedding import EmbeddingInfo
from protocol.errors import ErrorInfo
from protocol.fields import Count, LogitBias, Penalty, TokenId
from protocol.kv import KVSpec
from protocol.segments import PrefixStoreStatus
from protocol.tools import ToolCall

TimeSlicesMode = Literal["auto", "on", "off"]
"""Whether models with work share the device in time slices; ``auto``: only on accelerators."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. Temperature 0 is greedy, and ignores the filters.

    Bias and penalties change the logits first, in the order below, also with greedy sampling.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """Divisor of the logits; 0 takes the token with the highest logit after bias and penalties."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Keeps the likeliest tokens until their probabilities add up to this; 1 keeps all."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Number of likeliest tokens that remain; 0 keeps all."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Minimum probability of remaining tokens, as a share of the likeliest token's."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Seed: a request with the same seed gives the same tokens; absent: the daemon draws one."""
    logit_bias: LogitBias = {}
    """Value added to a token's logit, by token id."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Divisor of positive logits, and factor of negative ones, for all tokens seen so far.

    Covers prompt and completion, as in vLLM and Hugging Face; mlx-lm covers the last 20 tokens.
    """
    presence_penalty: Penalty = 0.0
    """Value subtracted from the logits of tokens in the completion."""
    frequency_penalty: Penalty = 0.0
    """Value subtracted from a token's logit for each time it occurs in the completion."""


class Alternative(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token that could be at a position, and its probability."""

    token: TokenId
    text: str
    """Text of this token alone; bytes that are not UTF-8 appear as U+FFFD."""
    logprob: float | None = None
    """Natural logarithm of the model's own probability, before bias, penalties, temperature and
    filters; -9999 for a probability of 0. Absent for the first token of a prompt."""
    bytes: list[int] | None = None
    """Bytes of the token, if ``text`` does not show them."""


class TokenLogprob(Alternative, frozen=True, omit_defaults=True):
    """The token at a position, and the likeliest tokens in descending order."""

    top: list[Alternative] = []
    """Likeliest tokens, as many as requested; they may include the token itself."""


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, for the model's chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str = ""
    """Reasoning of an earlier answer; most templates drop it."""
    tool_calls: list[ToolCall] = []
    """Calls of an earlier answer."""
    tool_call_id: str = ""
    """For role ``tool``: the call that the message answers."""
    name: str = ""
    """For role ``tool``: the tool's name."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens and precision levels of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache and not prefilled again."""
    levels: list[int] = []
    """Precision levels at which the tokens were generated, in order; 0 has the most bits.

    Several levels: the request was stepped down, or continued at another level after a worker's
    death. A prompt that was stepped down before the first token counts with its first level. Empty:
    no token was generated.
    """
    reasoning_tokens: int = 0
    """Tokens of the completion that are reasoning, with its markers."""


def record_level(levels: list[int], level: int) -> None:
    """Append a precision level to those of a request, unless it is the last one."""
    if levels[-1:] != [level]:
        levels.append(level)


class KVPart(msgspec.Struct, frozen=True, kw_only=True):
    """How the layers of one kind keep keys and values, or their state."""

    kind: str
    """Kind: ``full``, ``window 1024``, ``window 8192 keep 4``, ``chunk 8192`` or ``recurrent``."""
    layers: int
    path: Literal["pages", "dequantize-on-read", "dense", "state"]
    """How attention reads the keys and values, or the state, of these layers."""
    scheme: str
    """KV scheme such as ``k8v8``, or ``dense``."""
    batched: bool
    """Whether rows share a forward pass."""
    reason: str = ""
    """Why there are no pages, or no batching."""
    bytes_per_token: int = 0
    """Bytes of a token in all these layers; 0 if a row's bytes are bounded."""
    bound_bytes: int = 0
    """Maximum bytes of one row, for windows and states; 0 if a row's bytes grow."""


FastPathName = Literal[
    "native library", "whole layers", "fused attention", "compiled steps", "packed prefill"
]
"""C++ operations on CPUs; decode steps of whole layers in one block; decode attention by kernels;
decode steps whose graph is built once per shape; chunks of several prompts in one pass."""


class BitsByLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which bits the layers of a precision level get; each level keeps its size."""

    source: Literal["calibration", "probe", "uniform"]
    """``calibration``: the result of ``kvctl calibrate``. ``probe``: an estimate from the model's
    gradients. ``uniform``: all layers have the same scheme."""
    reason: str
    """Date of the calibration, or why the bits are as they are."""


FastPathCause = Literal["", "device", "switched_off", "model", "results", "speed", "error"]
"""Kinds of reasons against a fast path (`FastPath`); empty if it is used."""


class FusedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Whether decode attention uses kvd's own kernels; decided at every load."""

    used: bool
    reason: str | None = None
    """Why the kernels are not used: wrong results, lower speed, or the error they raised."""
    cause: FastPathCause = ""
    """Kind of `reason`, as that of a `FastPath`."""
    compile_s: float = 0.0
    """Seconds spent compiling the kernels that were checked."""
    call_ms: float | None = None
    """Milliseconds per layer with the kernels, averaged over the layers; absent: not timed."""
    reference_ms: float | None = None
    """Milliseconds per layer with plain operations; absent: not timed."""
    rows: int = 0
    """Rows in the timed step."""
    keys: int = 0
    """Keys of each of these rows."""
    layers: int = 0
    """Decoder layers computed by kernels entirely, including norms and products."""


class FastPath(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A faster way to compute, and whether the load chose it."""

    name: FastPathName
    used: bool
    cause: FastPathCause = ""
    """Kind of `reason`: the device or the model does not allow it, a setting forbids it, its
    results differ, it is slower, or it raised an error. Empty if it is used."""
    reason: str = ""
    """Why it is not used, as the load found out."""
    layers: int = 0
    """Decoder layers that use it, for ``whole layers``."""


class ChatAbilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's chat template and vocabulary allow; found out at load by rendering it."""

    tools: str = ""
    """Form of its tool calls, such as ``json in <tool_call>``; empty: it cannot call tools."""
    tools_noted: bool = False
    """Whether kvd lists tools in the system message (docs/models.md)."""
    tool_results: bool = False
    """Whether the template renders messages of role ``tool``."""
    reasoning: str = ""
    """Marker that begins its reasoning; empty: it has none."""
    reasoning_switch: bool = False
    """Whether requests can turn reasoning on and off."""
    reasons_by_default: bool = True
    """Whether the model reasons if the request does not turn it on or off."""
    efforts: list[str] = []
    """Values of the reasoning effort that change the prompt."""
    late_system: bool = False
    """Whether a message of role ``system`` may come after others."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found out about its model at load."""

    architecture: str
    parameters: int
    context_length: int
    """Maximum tokens of prompt and completion."""
    vocab_size: int
    layers: int
    dtype: str
    """Type of weights and activations, such as ``float32``."""
    kv_scheme: str
    """KV scheme of new rows, such as ``k8v8``."""
    kv_layout: str
    """Layout such as ``keys per channel, values per token``."""
    kv: list[KVPart] = []
    """All layers, by kind."""
    kv_schemes: list[str] = []
    """KV schemes by precision level; empty: unknown, or the model is served dense."""
    kv_mixes: dict[str, list[str]] = {}
    """Schemes by layer of the precision levels whose bits differ between layers, by level."""
    kv_bits: BitsByLayer | None = None
    """What decided the bits of layers; absent: unknown."""
    kv_calibrated: str | None = None
    """Lowest scheme that a calibration allows; absent: no calibration was found."""
    page_bytes: int
    """Bytes of one page in all layers."""
    kv_bytes_per_token: int
    attention_path: str
    """Decode attention in use: ``fused``, ``native`` or ``reference``, and its variant."""
    attention_error: float
    """Relative error against dense attention, from the self-check."""
    fused: FusedAttention | None = None
    """Result of checking the kernels; absent on CPUs, and if no attention uses pages."""
    has_chat_template: bool
    chat: ChatAbilities | None = None
    """Absent: the model has no chat template."""
    embedding: EmbeddingInfo | None = None
    """Absent: the model gives no embeddings."""
    device: str
    """Device such as ``cpu``, ``Apple M4 Max`` or ``NVIDIA H200``."""
    blas: str | None = None
    """BLAS library that was preloaded, on Linux without an accelerator."""
    native: str | None = None
    """State of kvd's own CPU operations: ``on``, or why they are off; absent on accelerators."""
    paths: list[FastPath] = []
    """Fast paths, each with the reason if the load declined it. Empty: unknown."""
    costs: Costs | None = None
    """Formulas for the memory that rows need; absent for models without formulas."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's memory by kind, in bytes."""

    weights: int = 0
    kv_pages: int = 0
    """Bytes of all pages in the pools, used or free."""
    kv_pages_used: int = 0
    kv_levels: tuple[int, ...] = ()
    """Bytes of used pages by precision level; dense pages count for level 0."""
    kv_tails: int = 0
    """Bytes of tails, including copies in snapshots."""
    scratch: int = 0
    """Bytes reserved for dequantized layers, for flushes, and for growing pools."""
    active: int = 0
    """Bytes in use according to MLX's allocator."""
    peak: int = 0
    """Maximum of ``active`` since the previous report."""
    cache: int = 0
    """Bytes that MLX's allocator keeps for reuse."""
    footprint: int = 0
    """Footprint of the process: phys_footprint on macOS, PSS on Linux."""


class PrefixUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the prefix cache since the load."""

    queries: int = 0
    """Prompts that were looked up."""
    query_tokens: int = 0
    """Tokens of those prompts."""
    hit_tokens: int = 0
    """Tokens that were found, and not prefilled again."""
    disk_tokens: int = 0
    """Tokens that were read from the prefix store. Those in neither count were prefilled."""
    checkpoints: int = 0
    """Checkpoints in the cache now."""
    held: int = 0
    """Bytes of these checkpoints: pages, tails and states."""
    evicted: int = 0
    """Checkpoints that were dropped to free memory."""


class Reclaimable(msgspec.Struct, frozen=True, kw_only=True):
    """Granted bytes that a worker could give back, by reclaim method.

    The bytes of a method do not include those of the methods before it.
    """

    spare: int = 0
    """Bytes granted and neither held nor reserved, bytes by which pools can shrink, and bytes of
    compiled grammars that are kept for later requests."""
    prefixes: int = 0
    """Bytes of checkpoints that no row uses."""
    levels: tuple[int, ...] = ()
    """Bytes freed by stepping all rows down to each lower precision level, beyond what the level
    before it frees. The last level is the quality floor."""
    preempt: int = 0
    """Bytes freed by preempting all rows that can be preempted now."""
    rows: int = 0
    """Requests that hold memory."""
    waiting: int = 0
    """Requests in the worker's queue, including preempted ones."""
    level: int = 0
    """Precision level of new rows now."""
    base: int = 0
    """Bytes that cannot be given back: weights, scratch and the interpreter."""


SPAN_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds: from a small model's step to a chunk of 8B on a CPU."""


class DurationHistogram(msgspec.Struct, frozen=True):
    """Durations by bucket.

    Buckets end at 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250 and 500 ms, and at 1, 2.5, 5, 10 and 30 s.
    The last one has no end.
    """

    counts: tuple[int, ...] = (0,) * (len(SPAN_BOUNDS_S) + 1)
    """Durations in each bucket alone, not cumulative."""
    total_s: float = 0.0
    """Sum of all durations, in seconds."""

    def __add__(self, other: DurationHistogram) -> DurationHistogram:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return DurationHistogram(counts, self.total_s + other.total_s)


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's counters; each report replaces the previous one."""

    step: int = 0
    """Steps so far, which also serve as a heartbeat."""
    rows_running: int = 0
    rows_prefilling: int = 0
    rows_waiting: int = 0
    max_rows_in_step: int = 0
    pages_used: int = 0
    pages_total: int = 0
    flushes: int = 0
    kernel_launches: int = 0
    """Launches of kvd's own attention kernels in decode steps (``info.fused``)."""
    prompt_tokens: int = 0
    """Prompt tokens of all requests, prefilled or from the prefix cache."""
    computed_tokens: int = 0
    """Prompt tokens that were prefilled."""
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    """Generated tokens per second, over the last seconds."""
    memory: MemoryUse = MemoryUse()
    prefix: PrefixUse = PrefixUse()
    reclaimable: Reclaimable = Reclaimable()
    phases: dict[str, DurationHistogram] = {}
    """Durations of the steps' phases, by phase."""


ModelState = Literal[
    "stopped", "spawning", "loading", "ready", "draining", "stopping", "backoff", "failed"
]


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes that share a model."""

    pid: int
    state: Literal["starting", "running"]
    """``running``: the process has joined the others."""
    footprint_bytes: int = 0
    """Footprint of the process as the daemon last read it; 0: not read yet."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model in ``status``."""

    name: str
    source: str
    """Source that the model was loaded from: ``demo``, a folder or a Hub id."""
    state: ModelState
    worker_pid: int | None = None
    ranks: list[RankStatus] = []
    """Processes of a model over several ranks, the first of which is `worker_pid`; else empty."""
    device: int | None = None
    """Number of the GPU that has the model, or its first rank; absent with fewer than two GPUs."""
    restarts: int = 0
    kv: KVSpec = KVSpec()
    granted_bytes: int = 0
    requests: int = 0
    """Requests that the daemon holds for the model, queued or running."""
    paused: int = 0
    """Requests that are paused: preempted, or waiting for the worker to restart."""
    pinned: bool = False
    """Whether the model is never evicted."""
    priority: int = 0
    """Priority when memory is short: models of lower priority give memory back first."""
    expires_in_s: float | None = None
    """Seconds until the idle limit unloads the model if no request arrives; absent: no limit."""
    idle_ttl_s: float | None = None
    """Seconds without requests after which the model is unloaded; absent: no limit."""
    info: ModelInfo | None = None
    stats: WorkerStats = WorkerStats()
    error: ErrorInfo | None = None
    """Why the model failed, or why it is in backoff."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's memory, in bytes."""

    total: int
    available: int
    accelerator_limit: int | None = None
    """Metal's recommended working set on Apple silicon, or memory of the smallest CUDA device."""
    devices: int = 1
    """Number of CUDA devices that the daemon may use; 1 if there is none."""
    accelerator_hidden: bool = False
    """Whether there is a CUDA device whose memory the driver does not report."""
    pressure: Literal["normal", "warning", "critical"] = "normal"
    """Memory pressure that the operating system reports."""


class ReceivedChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client has received of one choice."""

    tokens: Count = 0
    """Number of tokens."""
    text_bytes: Count = 0
    """Bytes of text in UTF-8."""
    parts: Count = 0
    """Number of parts whose beginning was received."""


class Problem(msgspec.Struct, frozen=True):
    """Something that differs from what the user expects, and what to do about it."""

    key: str
    """Setting that solves it, such as ``http.port``."""
    observed: str
    """What the daemon found."""
    advice: str
    """What to do."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``status``."""

    version: str
    pid: int
    uptime_s: float
    home: str
    state: Literal["serving", "draining"]
    budget_bytes: int
    granted_bytes: int
    devices: list[DeviceStatus] = []
    """Each GPU, in the order of their numbers; empty with fewer than two."""
    host_budget: DeviceStatus | None = None
    """The host's memory, if GPUs have memory of their own: `budget_bytes` is about theirs then."""
    violations: int = 0
    """Times that an invariant of the budget was violated: a bug in kvd, reported in its log."""
    footprint_bytes: int
    """Footprint of the daemon's process."""
    host: HostMemory
    models: list[ModelStatus]
    unloaded: list[str] = []
    """Known models without a worker; a request loads them."""
    config_pending: list[str] = []
    """Keys of `config.toml` whose new values wait for a restart, as of the last reload."""
    config_error: str | None = None
    """Why the last reload failed; the previous configuration stays in force."""
    config_reloads: int = 0
    """Number of reloads of the configuration."""
    http: list[str] = []
    """HTTP addresses such as ``http://127.0.0.1:11711`` or ``unix:/home/you/.kvd/http.sock``."""
    problems: list[Problem] = []
    """Problems of the start, of the budget in effect, and of the prefix store."""
    prefix_store: PrefixStoreStatus | None = None
    """The prefix store; absent while it is not configured."""
