"""Messages between client and daemon, version 1, as NDJSON over the Unix socket.

Requests are ``{"v": 1, "id": …, "op": …}``. Events are ``{"id": …, "event": …}``, with the id of
the request that they answer. A request ends with its *last* event (`is_last`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol import fields
from protocol.embedding import Embed
from protocol.errors import ErrorInfo
from protocol.explain_messages import (
    Explain,
    Explained,
    ExplainedRequests,
    ExplainRequest,
)
from protocol.fields import Count, PositiveCount
from protocol.kv import KVSpec
from protocol.message_base import EventBase, RequestBase, RequestId
from protocol.parts import PartStart
from protocol.policy import PolicyChange
from protocol.prefix_messages import Cache, CacheDrop, CacheDropped, CacheReply
from protocol.settings import Changed, Setting
from protocol.tools import ChatOptions, Grammar
from protocol.types import (
    ChatMessage,
    DaemonStatus,
    ModelStatus,
    Problem,
    ReceivedChoice,
    Sampling,
    TokenLogprob,
    Usage,
)

MAX_FRAME_BYTES = 8 * 1024 * 1024
"""Limits the memory that one line takes in the daemon; a prompt of 16K tokens is about 64 KiB."""
MAX_LISTED_TOKENS = 65_536
"""Maximum token ids in a reply to `Tokenize`."""


class Hello(RequestBase, tag="hello", frozen=True, kw_only=True):
    """Return the daemon's version and process id."""

    client: str = ""
    """Name of the client."""


class Status(RequestBase, tag="status", frozen=True, kw_only=True):
    """Return the status of the daemon and all models."""


class Metrics(RequestBase, tag="metrics", frozen=True, kw_only=True):
    """Return metrics for Prometheus."""


class Load(RequestBase, tag="load", frozen=True, kw_only=True):
    """Load a model."""

    model: fields.Source
    """Source: an embedded name, a folder's absolute path, or a Hub id."""
    alias: fields.Alias | None = None
    """Name that requests use; absent: the last part of the source."""
    kv: KVSpec | None = None
    """All settings of the KV cache; absent: those of the known model, otherwise the defaults."""
    policy: PolicyChange = PolicyChange()
    """Policy relative to other models. Absent fields keep the values of the known model."""


class Unload(RequestBase, tag="unload", frozen=True, kw_only=True):
    """Finish the model's requests, then end its worker.

    A model of the configuration stays known: a request that names it loads it again.
    """

    model: fields.Name
    force: bool = False
    """Whether running requests end at once."""


class Generate(RequestBase, tag="generate", frozen=True, kw_only=True):
    """Complete a prompt, given as exactly one of ``prompt``, ``messages`` and ``tokens``."""

    model: fields.Name
    """Name of a loaded or known model."""
    prompt: str | None = None
    """Raw text, without a chat template."""
    messages: list[ChatMessage] | None = None
    """Conversation, for the model's chat template."""
    tokens: list[fields.TokenId] | None = None
    """Token ids."""
    chat: ChatOptions = ChatOptions()
    """Tools, reasoning and further settings of a conversation."""
    grammar: Grammar | None = None
    """What the answer must match; absent: it is free."""
    sampling: Sampling = Sampling()
    """Sampling settings."""
    max_tokens: PositiveCount | None = None
    """Maximum tokens of each choice; absent: what is left of the context."""
    n: fields.Choices = 1
    """Number of choices; choice 0 is the same as with n = 1."""
    stop: fields.StopTexts = []
    """Texts that end a choice; neither they nor anything after them is sent."""
    stop_tokens: fields.StopTokens = []
    """Token ids that end a choice; they are not sent."""
    ignore_eos: bool = False
    """Whether the model's end token is treated as any other token."""
    min_tokens: Count = 0
    """Minimum tokens of a choice. Earlier, end tokens are not drawn and stop texts are ignored."""
    logprobs: fields.TopLogprobs | None = None
    """Number of likeliest tokens to report with each token's logprob; absent: no logprobs."""
    prompt_logprobs: fields.TopLogprobs | None = None
    """Number of likeliest tokens to report for each prompt token, in ``prompt_logprobs`` events."""
    priority: fields.Priority = 0
    """Priority in the queue; higher values are admitted first."""
    deadline_s: fields.DeadlineSeconds | None = None
    """Seconds from arrival until the request ends with ``deadline_exceeded``, queued or running."""
    prefix_salt: fields.Salt | None = None
    """Isolation key: prompts share cached prefixes only with prompts of the same salt."""
    keep_alive_s: fields.KeepAliveSeconds | None = None
    """Idle limit of the model until it is unloaded, seconds; negative: none; absent: unchanged."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: must be at most max_tokens, {self.max_tokens}")


class Attach(RequestBase, tag="attach", frozen=True, kw_only=True):
    """Continue a request that an earlier daemon accepted and wrote to its journal."""

    request: RequestId
    """Name of the request, from its ``accepted`` event."""
    received: Annotated[list[ReceivedChoice], Meta(max_length=fields.MAX_CHOICES)] = []
    """What the client has of each choice, also beyond the journal; empty: nothing."""
    received_prompt_logprobs: Count = 0
    """Tokens of the prompt whose logprobs the client has."""


class Cancel(RequestBase, tag="cancel", frozen=True, kw_only=True):
    """Cancel another request of this connection; the other one ends with reason ``cancelled``."""

    target: RequestId
    """Id of the other request."""


class Pin(RequestBase, tag="pin", frozen=True, kw_only=True):
    """Pin a model, so that it is never evicted."""

    model: fields.Name


class Unpin(RequestBase, tag="unpin", frozen=True, kw_only=True):
    """Unpin a model."""

    model: fields.Name


class Configure(RequestBase, tag="config", frozen=True, kw_only=True):
    """Change settings until the daemon ends or reloads its file; no fields: return the budget."""

    budget_bytes: Annotated[int, Meta(ge=1, le=fields.MAX_BYTES)] | None = None
    """New memory budget; with several GPUs, the budget of each. A lower budget ends no requests;
    memory is reclaimed over time."""
    settings: dict[str, Any] = {}
    """New values by key, applied all or none; ``null`` restores the file's value."""
    table: bool = False
    """Whether the reply lists every setting."""


class Reload(RequestBase, tag="reload", frozen=True, kw_only=True):
    """Read `config.toml` again and apply it; an invalid file is refused and changes nothing."""


class Events(RequestBase, tag="events", frozen=True, kw_only=True):
    """Return what the governor and other parts did, and why: the newest 4096 records."""

    model: fields.Name | None = None
    """Filter: only records about this model, on its behalf, or about no model; absent: all."""
    since: Count = 0
    """Number of the last record that the client has."""
    follow: bool = False
    """Whether new records follow until a ``cancel``."""


class Tokenize(RequestBase, tag="tokenize", frozen=True, kw_only=True):
    """Return the tokens of exactly one of ``prompt`` and ``messages``, without running anything."""

    model: fields.Name
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat: ChatOptions = ChatOptions()
    """Settings of the conversation that change its prompt, such as tools."""
    limit: Annotated[int, Meta(ge=0, le=MAX_LISTED_TOKENS)] = MAX_LISTED_TOKENS
    """Maximum tokens in the reply; 0: only their number."""
    texts: bool = False
    """Whether the reply includes each token's text."""


class Drain(RequestBase, tag="drain", frozen=True, kw_only=True):
    """Accept no new work and finish running requests; the daemon stays up."""


class Shutdown(RequestBase, tag="shutdown", frozen=True, kw_only=True):
    """Drain, then exit with status 0."""

    force: bool = False
    """Whether running requests end at once."""


Request = (
    Hello
    | Status
    | Metrics
    | Load
    | Unload
    | Pin
    | Unpin
    | Configure
    | Reload
    | Events
    | Explain
    | ExplainRequest
    | Tokenize
    | Cache
    | CacheDrop
    | Generate
    | Embed
    | Attach
    | Cancel
    | Drain
    | Shutdown
)


class HelloReply(EventBase, tag="hello", frozen=True, kw_only=True):
    """Answers ``hello``."""

    version: str
    protocol: int
    pid: int
    home: str


class StatusReply(EventBase, tag="status", frozen=True, kw_only=True):
    """Answers ``status``."""

    status: DaemonStatus


class MetricsReply(EventBase, tag="metrics", frozen=True, kw_only=True):
    """Answers ``metrics``."""

    text: str
    """Metrics in Prometheus's text format."""


class Loading(EventBase, tag="loading", frozen=True, kw_only=True):
    """Progress of a load."""

    model: str
    stage: str
    fraction: float
    """Fraction of the whole load, 0 to 1."""


class Loaded(EventBase, tag="loaded", frozen=True, kw_only=True):
    """The model is ready."""

    model: ModelStatus


class Unloaded(EventBase, tag="unloaded", frozen=True, kw_only=True):
    """The worker has exited and its memory is free."""

    model: str
    freed_bytes: int


class Accepted(EventBase, tag="accepted", frozen=True, kw_only=True):
    """The worker has accepted the request."""

    prompt_tokens: int
    seed: int
    """Seed of the sampling, drawn by the daemon if the request has none."""
    request: str = ""
    """Name for ``attach``; empty if the request is not in a journal on disk."""


class Queued(EventBase, tag="queued", frozen=True, kw_only=True):
    """The request waits for a place or for memory."""

    position: int
    """Position in the queue; 1 is next."""


class PrefillStarted(EventBase, tag="prefill", frozen=True, kw_only=True):
    """The prefill of the prompt begins; sent at most once, before the first tokens."""

    cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""


class Paused(EventBase, tag="paused", frozen=True, kw_only=True):
    """The request is paused; it resumes later without loss."""

    reason: Literal["restart", "memory"]
    """Reason: the model's worker restarts, or other requests need the memory."""


class Resumed(EventBase, tag="resumed", frozen=True, kw_only=True):
    """A paused request continues with its next token."""


class Tokens(EventBase, tag="tokens", frozen=True, kw_only=True):
    """The next tokens of a choice, with the text that they complete.

    ``text`` never ends inside a character or inside a possible stop text, so it may lag behind the
    tokens.
    """

    index: int
    """Position of the first of these tokens in the choice."""
    tokens: list[int]
    text: str
    choice: int = 0
    """Number of the choice."""
    parts: list[PartStart] = []
    """Parts that begin in this text: reasoning, tool calls, and text after them."""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token, if requested."""


class PromptLogprobs(EventBase, tag="prompt_logprobs", frozen=True, kw_only=True):
    """Logprobs of the next tokens of the prompt."""

    index: int
    """Position of the first of these tokens in the prompt."""
    logprobs: list[TokenLogprob]


FinishReason = Literal["stop", "length", "cancelled"]


class ChoiceFinished(EventBase, tag="choice_finished", frozen=True, kw_only=True):
    """One of several choices ended; ``done`` follows the last of them."""

    choice: int
    reason: FinishReason


class Done(EventBase, tag="done", frozen=True, kw_only=True):
    """The request ended, with all its choices."""

    reason: FinishReason
    """Reason; among choices, ``cancelled`` precedes ``length``, which precedes ``stop``."""
    usage: Usage
    """Tokens of all choices together; the prompt counts once."""
    stop_text: str = ""
    """Text of ``stop`` that ended the only choice; empty: none did, or there are several."""
    embedding: bytes | None = None
    """Vector of length 1, float32, little endian (base64 in JSON); only after ``embed``."""
    notes: list[str] = []
    """Why a tool call was sent as text, and which grammars were not enforced; at most 8."""


class Pinned(EventBase, tag="pinned", frozen=True, kw_only=True):
    """Answers ``pin`` and ``unpin``."""

    model: str
    pinned: bool


class Configured(EventBase, tag="config", frozen=True, kw_only=True):
    """Answers ``config`` and ``reload``."""

    budget_bytes: int
    """Memory budget; with several GPUs, the budget of each."""
    granted_bytes: int
    """Bytes granted; with several GPUs, on the GPU with the most. After the budget was lowered,
    they exceed it until memory is reclaimed."""
    settings: list[Setting] = []
    """Every setting, if requested."""
    changes: list[Changed] = []
    """Changes that ``settings`` or the file caused."""
    problems: list[Problem] = []
    """Problems that remain, as in `DaemonStatus`."""


class EventRecord(EventBase, tag="record", frozen=True, kw_only=True):
    """One record of what was done or observed."""

    seq: int
    """Number of the record among all records, from 1 without gaps. Only the newest are kept."""
    at: float
    """Seconds since 1970."""
    kind: str
    """Kind such as ``evict``, ``reclaim_precision`` or ``load_refused``."""
    model: str | None = None
    """Model that was affected."""
    reason: str = ""
    requester: str | None = None
    """Model on whose behalf the action was taken."""
    numbers: dict[str, int] = {}
    """Bytes (``_bytes``), levels and counts that the decision used."""


class EventsReply(EventBase, tag="events", frozen=True, kw_only=True):
    """Answers ``events``, after all records."""

    last: int
    """Number of the newest record; 0 if there is none."""


class Tokenized(EventBase, tag="tokenized", frozen=True, kw_only=True):
    """Answers ``tokenize``."""

    count: int
    """Number of all tokens."""
    tokens: list[int] = []
    """First tokens, up to ``limit``."""
    texts: list[str] = []
    """Texts of these tokens, if requested; bytes that are not UTF-8 appear as U+FFFD."""


class Cancelled(EventBase, tag="cancelled", frozen=True, kw_only=True):
    """Answers ``cancel``; the target itself ends with ``done`` and reason ``cancelled``."""

    target: str
    found: bool
    """Whether the target was still open."""


class Drained(EventBase, tag="drained", frozen=True, kw_only=True):
    """All requests have ended."""


class ShutdownReply(EventBase, tag="shutdown", frozen=True, kw_only=True):
    """The daemon exits now."""


class Error(EventBase, tag="error", frozen=True, kw_only=True):
    """The request failed. With an empty ``id`` the connection failed, and closes."""

    error: ErrorInfo


Event = (
    HelloReply
    | StatusReply
    | MetricsReply
    | Loading
    | Loaded
    | Unloaded
    | Accepted
    | Queued
    | PrefillStarted
    | Paused
    | Resumed
    | PromptLogprobs
    | Tokens
    | ChoiceFinished
    | Done
    | Pinned
    | Configured
    | EventRecord
    | EventsReply
    | Explained
    | ExplainedRequests
    | Tokenized
    | CacheReply
    | CacheDropped
    | Cancelled
    | Drained
    | ShutdownReply
    | Error
)


def is_last(event: Event) -> bool:
    """Return whether this is the last event of its request."""
    return not isinstance(event, _NOT_LAST)


_NOT_LAST = (
    Tokens,
    Loading,
    Accepted,
    Queued,
    PrefillStarted,
    Paused,
    Resumed,
    PromptLogprobs,
    ChoiceFinished,
    EventRecord,
)
