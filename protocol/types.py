"""Values that both protocols carry: client <-> daemon and daemon <-> worker.

Bytes are integers, durations are seconds (``_s``), token positions count from zero.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.costs import Costs
from protocol.errors import ErrorInfo
from protocol.histogram import DurationHistogram
from protocol.schemes import Scheme

MAX_BYTES = 2**63 - 1
"""Of sizes in bytes."""
MAX_INT = 2**31 - 1
"""Of counts and token ids: JSON has no bound of its own, msgpack and arrays do."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
ALIAS_PATTERN = r"^(?!-)[A-Za-z0-9._:/@+-]+\Z"
"""Names go into tables, logs and command lines: nothing there may move the cursor or split them."""
ALIAS_RULE = "may hold letters, digits and ._:/@+- only, and must not start with -"
Alias = Annotated[str, Meta(min_length=1, max_length=256, pattern=ALIAS_PATTERN)]
Bits = Literal[2, 3, 4, 5, 6, 8, 16]
TimeSlicesMode = Literal["auto", "on", "off"]
"""Whether models that compute at once take turns; ``auto``: where there is an accelerator."""


MAX_CHOICES = 16
MAX_LOGPROBS = 20
"""The most likely tokens that can be told beside the drawn one; OpenAI's bound."""
MAX_LOGIT_BIASES = 1024
"""Entries of ``logit_bias``; they are sent to the device at each join of a batch."""
MAX_PRIORITY = 100
MAX_DEADLINE_S = 7 * 24 * 3600.0
NO_LOGPROB = -9999.0
"""For a probability of 0, since JSON has no infinity; OpenAI and vLLM say the same."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
"""OpenAI's range; negative ones favour what was there."""
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
DeadlineSeconds = Annotated[float, Meta(gt=0.0, le=MAX_DEADLINE_S)]
Salt = Annotated[str, Meta(max_length=256)]
StopTexts = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)]
StopTokens = Annotated[list[TokenId], Meta(max_length=64)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIASES)
]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. Temperature 0 is greedy, whatever the filters say.

    Bias and penalties change the logits first, in the order below; they hold for greedy rows too.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """Divides what stays; 0 takes the likeliest token, after bias and penalties."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """The most likely tokens that have this share of the probability stay."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """So many of the most likely tokens stay; 0 keeps all."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Tokens stay that have this share of the likeliest one's probability."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """The same request with the same seed gives the same tokens; absent: the daemon draws one."""
    logit_bias: LogitBias = {}
    """By token id; added to its logit."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Divides the positive and multiplies the negative logits of all tokens seen so far.

    Of prompt and completion, as vLLM and Hugging Face have it; mlx-lm looks at the last 20 only.
    """
    presence_penalty: Penalty = 0.0
    """Taken from the logits of tokens that the completion has."""
    frequency_penalty: Penalty = 0.0
    """The same, as often as it has them."""


class Alternative(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token that could stand at a place, and how likely it was."""

    token: int
    text: str
    """Of the token alone; bytes that are no UTF-8 show as U+FFFD."""
    logprob: float | None = None
    """Natural logarithm of the model's own probability, before bias, penalties, temperature and
    filters; -9999 for 0. Absent for the first token of a prompt."""
    bytes: list[int] | None = None
    """Of the token, where ``text`` does not show them."""


class TokenLogprob(Alternative, frozen=True, omit_defaults=True):
    """The token that stands there, and the most likely ones in falling order."""

    top: list[Alternative] = []
    """As many as were asked for, whether the token is among them or not."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation, for the model's own chat template."""

    role: Literal["system", "user", "assistant"]
    content: str


SCHEMES = ("k8v8", "k8v4", "k4v4")
MIN_KV_SIZE = 256
"""A row's newest 64 to 127 tokens are dense anyway, its first ones hold a page, and so does what
falls out next: a smaller bound would save nothing."""
NEWEST_TOKENS = 128
"""What ``keep`` must leave of ``max_kv_size``: the most that a row's dense tail holds."""
MAX_LAYERS = 4096


class KVRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's KV cache is kept, beside the bits and groups that new rows start with.

    Raises ``ValueError`` with ``field: what is wrong`` where fields do not fit each other.
    """

    schemes: Annotated[tuple[str, ...], Meta(max_length=8)] = SCHEMES
    """Schemes to step down to, each below the one before it.

    Those that are not below the start are passed over. Names without a group have the start's.
    """
    floors: dict[Annotated[int, Meta(ge=-MAX_LAYERS, lt=MAX_LAYERS)], str] = {}
    """Layer (negative: from the end) to the scheme that it does not go below.

    ``k16v16`` is never quantized.
    """
    quantized_kv_start: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Rows stay dense until they have so many tokens."""
    max_kv_size: Annotated[int, Meta(ge=MIN_KV_SIZE, le=MAX_INT)] | None = None
    """The most tokens that a row attends to: the first ``keep`` and the newest; absent: all."""
    keep: Annotated[int, Meta(ge=0, le=MAX_INT)] = 4
    """Of those, how many are the row's first ones; leaves 128 for the newest."""
    prefix_cache: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 256 * 1024 * 1024
    """Bytes of the budget that prompts which were read once may hold for later ones; 0: none."""
    prefix_every: Annotated[int, Meta(ge=0, le=MAX_INT)] = 1024
    """Tokens between the places in a prompt that later ones may go on from; 0: only its end."""

    def __post_init__(self) -> None:
        if self.max_kv_size is not None and self.keep > self.max_kv_size - NEWEST_TOKENS:
            raise ValueError(
                f"keep: must leave {NEWEST_TOKENS} of max_kv_size for the newest tokens, so be at "
                f"most {self.max_kv_size - NEWEST_TOKENS}"
            )


class KVSpec(KVRules, frozen=True):
    """How a model's KV cache is stored: bits of keys and of values, and what `KVRules` says.

    16 bits are not quantized.
    """

    k_bits: Bits = 8
    """Of keys; 16: not quantized."""
    v_bits: Bits = 8
    """Of values."""
    group_size: Literal[32, 64] = 64
    """Elements that share a scale; of values too, unless they have their own."""
    value_group_size: Literal[32, 64, 128] | None = None
    """Of values; absent: as keys have it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above = None
        for name in self.schemes:
            method = self._named("schemes", name)
            if above is not None and not method.is_below(above):
                raise ValueError(
                    "schemes: must go down: each scheme takes less than the one before it for keys "
                    f"or for values, and more for neither; {name} does not after {above.name}"
                )
            above = method
        for name in self.floors.values():
            self._named("floors", name)

    def _named(self, field: str, name: str) -> Scheme:
        try:
            return self.scheme_of(name)
        except ValueError as error:
            raise ValueError(f"{field}: must hold KV schemes, and {error}") from None

    def scheme_of(self, name: str) -> Scheme:
        """Return the scheme of this name, in these groups where it says none."""
        return Scheme.parse(name, self.group_size, self.value_group_size)

    @property
    def scheme(self) -> Scheme:
        """The scheme that new rows start with."""
        value_group = self.value_group_size or self.group_size
        return Scheme(self.k_bits, self.v_bits, self.group_size, value_group)

    @property
    def steps(self) -> list[Scheme]:
        """What rows may step down to, each below the one before it."""
        start = self.scheme
        methods = [self.scheme_of(name) for name in self.schemes]
        return [method for method in methods if method.is_below(start)]

    @property
    def name(self) -> str:
        """That scheme as people write it, such as ``k8v4``."""
        return self.scheme.name


class Usage(msgspec.Struct, frozen=True):
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt, those that an earlier one had left in the cache: they were not read again."""
    levels: list[int] = []
    """Levels of the model's KV ladder that it ran on, in order; 0 is the top.

    Several: it was stepped down while it ran, to make room. Empty: it held nothing.
    """


class KVPart(msgspec.Struct, frozen=True, kw_only=True):
    """How the layers of one kind keep what they have seen."""

    kind: str
    """``full``, ``window 1024``, ``window 8192 keep 4``, ``chunk 8192`` or ``recurrent``."""
    layers: int
    path: Literal["pages", "dequantize-on-read", "dense", "state"]
    """How attention reads it."""
    scheme: str
    """Such as ``k8v8``, or ``dense``."""
    batched: bool
    """Whether rows share a forward pass."""
    reason: str = ""
    """Why not pages, or why not batched."""
    bytes_per_token: int = 0
    """Of all these layers; 0 where a row's bytes are bounded."""
    bound_bytes: int = 0
    """The most that one row takes, for windows and states; 0 where it grows."""


class FusedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Whether decode attention runs as kernels of kvd's own: found out at every load."""

    used: bool
    reason: str | None = None
    """Why they are not used: wrong, slower, or what they failed with."""
    compile_s: float = 0.0
    """Seconds that compiling took, for what was checked."""
    call_ms: float | None = None
    """Milliseconds that a layer takes, on average over the layers; absent: not timed."""
    reference_ms: float | None = None
    """The same with plain operations."""
    rows: int = 0
    """In the step that was timed."""
    keys: int = 0
    """Of each of these rows."""
    layers: int = 0
    """Decoder layers whose steps are kernels as a whole, norms and products included."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found out about its model when it loaded it."""

    architecture: str
    parameters: int
    context_length: int
    vocab_size: int
    layers: int
    dtype: str
    """Of weights and activations, such as ``float32``."""
    kv_scheme: str
    """Such as ``k8v8``."""
    kv_layout: str
    """Such as ``keys per channel, values per token``."""
    kv: list[KVPart] = []
    """All layers, by kind."""
    kv_schemes: list[str] = []
    """What pages may be, from the top down; empty: not told, or the model is served dense."""
    kv_calibrated: str | None = None
    """The scheme that a calibration lets pages go down to; absent: none was found."""
    page_bytes: int
    """Of one page in all layers."""
    kv_bytes_per_token: int
    attention_path: str
    """Which decode attention was chosen: ``fused``, ``native`` or ``reference``, and how."""
    attention_error: float
    """The self-check's relative error against dense attention."""
    fused: FusedAttention | None = None
    """What came of the kernels; absent on CPUs, and where no attention is over pages."""
    has_chat_template: bool
    device: str
    """Such as ``cpu``, ``Apple M4 Max`` or ``NVIDIA H200``."""
    blas: str | None = None
    """The BLAS library that was preloaded, on Linux without an accelerator."""
    native: str | None = None
    """There, ``on`` where kvd's own operations compute, else why they do not."""
    costs: Costs | None = None
    """What its rows cost; absent where no formula says it."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's memory by kind, in bytes."""

    weights: int = 0
    kv_pages: int = 0
    """All pages of the pools, used or free."""
    kv_pages_used: int = 0
    kv_levels: tuple[int, ...] = ()
    """Of these, those on each level of the ladder, its top first; dense ones are on the top."""
    kv_tails: int = 0
    scratch: int = 0
    """Reserved for dequantized layers, flushes and growth."""
    active: int = 0
    """What MLX's allocator counts as in use."""
    peak: int = 0
    """The most that it counted since it was told last."""
    cache: int = 0
    """What MLX's allocator keeps for reuse."""
    footprint: int = 0
    """Of the process: phys_footprint on macOS, PSS on Linux."""


class PrefixUse(msgspec.Struct, frozen=True, kw_only=True):
    """What came of prompts that were read once, since the load; hits are counted in tokens."""

    queries: int = 0
    """Prompts that were looked up."""
    query_tokens: int = 0
    """Their tokens."""
    hit_tokens: int = 0
    """Of these, those that were found and not read again."""
    checkpoints: int = 0
    """Places that prompts can go on from now."""
    held: int = 0
    """Bytes that these hold, in pages, tails and states."""
    evicted: int = 0
    """Checkpoints that were dropped to make room."""


class Reclaimable(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker could give back of its grant, in bytes; each on top of those before it."""

    spare: int = 0
    """Granted, and neither held nor reserved; pools that can be cut are in it."""
    prefixes: int = 0
    """Checkpoints of prompts that no row uses."""
    levels: tuple[int, ...] = ()
    """One entry for each lower level of its ladder: what stepping all rows down to it frees.

    Each on top of the level above; the last is the model's quality floor.
    """
    preempt: int = 0
    """What parking all rows frees that may be parked now."""
    rows: int = 0
    """Requests that have memory."""
    waiting: int = 0
    """Requests in its queue, parked ones too."""
    level: int = 0
    """Where new rows start now; 0 is the top."""
    base: int = 0
    """What stays: weights, scratch and the interpreter."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's counters; the newest one replaces those before it."""

    step: int = 0
    """Steps so far: the heartbeat."""
    rows_running: int = 0
    rows_prefilling: int = 0
    rows_waiting: int = 0
    max_rows_in_step: int = 0
    pages_used: int = 0
    pages_total: int = 0
    flushes: int = 0
    kernel_launches: int = 0
    """Attention kernels of kvd's own that decode steps have launched (``info.fused``)."""
    prompt_tokens: int = 0
    """Of all requests, read or found in the cache."""
    computed_tokens: int = 0
    """Prompt tokens that were read."""
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    """Generated, over the last seconds."""
    memory: MemoryUse = MemoryUse()
    prefix: PrefixUse = PrefixUse()
    reclaimable: Reclaimable = Reclaimable()
    phases: dict[str, DurationHistogram] = {}
    """How long it was in each phase of its steps, each time."""


ModelState = Literal[
    "stopped", "spawning", "loading", "ready", "draining", "stopping", "backoff", "failed"
]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model in ``status``."""

    name: str
    source: str
    """What it was loaded from: ``demo``, a folder or a Hub id."""
    state: ModelState
    worker_pid: int | None = None
    restarts: int = 0
    kv: KVSpec = KVSpec()
    granted_bytes: int = 0
    requests: int = 0
    """Requests that the daemon holds for it, queued or running."""
    paused: int = 0
    """Of these, those that gave their memory to others, or wait for its process, and go on."""
    pinned: bool = False
    """Never unloaded to make room."""
    priority: int = 0
    """When memory is short, models of lower priority give first."""
    info: ModelInfo | None = None
    stats: WorkerStats = WorkerStats()
    error: ErrorInfo | None = None
    """Why it failed, or why it is in backoff."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has, in bytes."""

    total: int
    available: int
    accelerator_limit: int | None = None
    """Metal's recommended working set, where there is one."""
    pressure: Literal["normal", "warning", "critical"] = "normal"


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All of ``status``."""

    version: str
    pid: int
    uptime_s: float
    home: str
    state: Literal["serving", "draining"]
    budget_bytes: int
    granted_bytes: int
    violations: int = 0
    """How often the grants were seen to exceed the budget: a bug of kvd's, and in its log."""
    footprint_bytes: int
    """Of the daemon process."""
    host: HostMemory
    models: list[ModelStatus]
    unloaded: list[str] = []
    """Models that are known and not loaded: a request brings them."""
    config_pending: list[str] = []
    """Keys of `config.toml` that have changed and do not hold yet, as of the last reload."""
    config_error: str | None = None
    """Why the last reload was refused; the configuration before it holds."""
    config_reloads: int = 0
    """How often it was read again."""
    http: list[str] = []
    """Where it answers HTTP: ``http://127.0.0.1:11711``, ``unix:/home/you/.kvd/http.sock``."""
