"""Client <-> daemon, version 1: what travels as NDJSON over the Unix socket.

Requests carry ``{"v": 1, "id": …, "op": …}``; events carry ``{"id": …, "event": …}`` with the
id of the request that they answer. A request is over with its *last* event (`is_last`);
``generate`` and ``load`` have several before it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import ErrorInfo
from protocol.forecast import Forecast
from protocol.policy import ModelPolicy
from protocol.settings import Changed, Setting
from protocol.types import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_INT,
    Alias,
    ChatMessage,
    Choices,
    DaemonStatus,
    DeadlineSeconds,
    KVSpec,
    ModelStatus,
    Name,
    Priority,
    Salt,
    Sampling,
    StopTexts,
    StopTokens,
    TokenId,
    TokenLogprob,
    TopLogprobs,
    Usage,
)

VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
"""Bounds what one line can make the daemon hold; a 16K-token prompt is about 64 KiB."""

RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


MAX_FORECAST_ROWS = 65_536
"""That `explain` reckons with."""
MAX_LISTED_TOKENS = 65_536
"""Token ids that `tokenize` tells."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    id: RequestId
    """Yours; unique among those of the connection that are not over."""
    v: int = VERSION


class Hello(_Request, tag="hello", frozen=True, kw_only=True):
    """Ask who is there."""

    client: str = ""
    """Who you are."""


class Status(_Request, tag="status", frozen=True, kw_only=True):
    """Ask for everything that `kvctl status` shows."""


class Metrics(_Request, tag="metrics", frozen=True, kw_only=True):
    """Ask for what Prometheus reads."""


class Load(_Request, tag="load", frozen=True, kw_only=True):
    """Load a model: an embedded name, a folder's absolute path, or a Hub id."""

    model: Name
    """Embedded name, absolute folder or Hub id."""
    alias: Alias | None = None
    """The name that requests use; absent: the model's own short name."""
    kv: KVSpec = KVSpec()
    """How its KV cache is kept."""
    policy: ModelPolicy | None = None
    """How it stands beside other models; absent: as before, if it is known."""


class Unload(_Request, tag="unload", frozen=True, kw_only=True):
    """Finish the model's requests, then end its worker."""

    model: Name
    force: bool = False
    """End them at once."""


class Generate(_Request, tag="generate", frozen=True, kw_only=True):
    """Complete a prompt. Exactly one of ``prompt``, ``messages`` and ``tokens`` is given."""

    model: Name
    """The name under which it was loaded, or is known."""
    prompt: str | None = None
    """Raw text: no chat template."""
    messages: list[ChatMessage] | None = None
    """A conversation, for the model's chat template."""
    tokens: list[TokenId] | None = None
    """Token ids, as they are."""
    sampling: Sampling = Sampling()
    """How tokens are drawn."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """Absent: as much as fits the context, at most 512."""
    n: Choices = 1
    """Completions of the one prompt; choice 0 is that of n = 1."""
    stop: StopTexts = []
    """The completion ends before the first of these; none of it is sent."""
    stop_tokens: StopTokens = []
    """The same, of token ids."""
    ignore_eos: bool = False
    """The model's own end is a token like any other."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Nothing that could end the completion is drawn, and no stop text heeded, before so many."""
    logprobs: TopLogprobs | None = None
    """Tell each token's logprob, with so many of the most likely ones; absent: nothing."""
    prompt_logprobs: TopLogprobs | None = None
    """The same of the prompt's tokens, in ``prompt_logprobs`` events."""
    priority: Priority = 0
    """Higher ones are taken first."""
    deadline_s: DeadlineSeconds | None = None
    """From its arrival; then it ends with ``deadline_exceeded``, also while it waits."""
    prefix_salt: Salt | None = None
    """Prompts share cached beginnings only with those that have the same one."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: must be at most max_tokens, {self.max_tokens}")


class ReceivedChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client has of one completion."""

    tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    text_bytes: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Of its text, in UTF-8."""


class Attach(_Request, tag="attach", frozen=True, kw_only=True):
    """Get the rest of a request that a daemon before this one has left in the journal."""

    request: RequestId
    """As ``accepted`` named it."""
    received: Annotated[list[ReceivedChoice], Meta(max_length=MAX_CHOICES)] = []
    """One for each completion; empty: nothing."""
    received_prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Tokens of the prompt whose logprobs have come."""


class Cancel(_Request, tag="cancel", frozen=True, kw_only=True):
    """End another request of this connection; it gets ``done`` with reason ``cancelled``."""

    target: RequestId
    """The other one's ``id``."""


class Pin(_Request, tag="pin", frozen=True, kw_only=True):
    """Never unload this model to make room."""

    model: Name


class Unpin(_Request, tag="unpin", frozen=True, kw_only=True):
    """Take that back."""

    model: Name


class Configure(_Request, tag="config", frozen=True, kw_only=True):
    """Change what may change while the daemon runs, until it ends; without fields: tell it."""

    budget_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)] | None = None
    """A lower budget is worked off: nothing that runs is ended for it."""
    settings: dict[str, Any] = {}
    """New values by key, all or none of which are taken; ``null``: what the file says."""
    table: bool = False
    """Tell every setting."""


class Events(_Request, tag="events", frozen=True, kw_only=True):
    """Tell what the governor and others did, and why: the newest some thousand things."""

    model: Name | None = None
    """Only what was done to this one, or for it."""
    since: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Only what came after the one of this number."""
    follow: bool = False
    """Go on with what happens from now on, until a ``cancel``."""


class Explain(_Request, tag="explain", frozen=True, kw_only=True):
    """Tell what rows of a model would take, and what would make room for them."""

    model: Name
    """The name of one that is loaded or known; else what it would be loaded from."""
    rows: Annotated[int, Meta(ge=0, le=MAX_FORECAST_ROWS)] = 1
    context: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """Tokens of each, prompt and completion together; absent: the model's whole context."""
    kv: KVSpec | None = None
    """Of a model that is neither loaded nor known; absent: what ``load`` has without it."""


class Tokenize(_Request, tag="tokenize", frozen=True, kw_only=True):
    """Tell the tokens of a text, as ``generate`` would read it; nothing runs for it.

    Exactly one of ``prompt`` and ``messages`` is given.
    """

    model: Name
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    limit: Annotated[int, Meta(ge=0, le=MAX_LISTED_TOKENS)] = MAX_LISTED_TOKENS
    """Tell so many of the first tokens at most; 0: only how many there are."""
    texts: bool = False
    """Tell each token's text too."""


class Drain(_Request, tag="drain", frozen=True, kw_only=True):
    """Take no new work, finish what runs; the daemon stays up."""


class Shutdown(_Request, tag="shutdown", frozen=True, kw_only=True):
    """Drain, then exit 0."""

    force: bool = False
    """Do not wait for what runs."""


Request = (
    Hello
    | Status
    | Metrics
    | Load
    | Unload
    | Pin
    | Unpin
    | Configure
    | Events
    | Explain
    | Tokenize
    | Generate
    | Attach
    | Cancel
    | Drain
    | Shutdown
)


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    id: str
    """Of the request that it answers."""


class HelloReply(_Event, tag="hello", frozen=True, kw_only=True):
    """Who is there."""

    version: str
    protocol: int
    pid: int
    home: str


class StatusReply(_Event, tag="status", frozen=True, kw_only=True):
    """Everything that `kvctl status` shows."""

    status: DaemonStatus


class MetricsReply(_Event, tag="metrics", frozen=True, kw_only=True):
    """Answers ``metrics``."""

    text: str
    """In Prometheus's text format."""


class Loading(_Event, tag="loading", frozen=True, kw_only=True):
    """How far a load is."""

    model: str
    stage: str
    fraction: float
    """0 to 1 of the whole load."""


class Loaded(_Event, tag="loaded", frozen=True, kw_only=True):
    """The model answers requests."""

    model: ModelStatus


class Unloaded(_Event, tag="unloaded", frozen=True, kw_only=True):
    """The worker has exited and its memory is free."""

    model: str
    freed_bytes: int


class Accepted(_Event, tag="accepted", frozen=True, kw_only=True):
    """The worker has the request; ``seed`` is the one that it samples with."""

    prompt_tokens: int
    seed: int
    request: str = ""
    """The daemon's name for it, to ``attach`` by; empty where the journal is not on disk."""


class Queued(_Event, tag="queued", frozen=True, kw_only=True):
    """The request waits for a place or for memory."""

    position: int
    """1: it is next."""


class Paused(_Event, tag="paused", frozen=True, kw_only=True):
    """The request rests, and goes on by itself: nothing of it is lost."""

    reason: Literal["restart", "memory"]
    """Its model's process is started again, or others need its memory."""


class Resumed(_Event, tag="resumed", frozen=True, kw_only=True):
    """A request that was parked goes on; its next token is the one after its last."""


class Tokens(_Event, tag="tokens", frozen=True, kw_only=True):
    """The next tokens of a completion, with the text that they complete.

    ``text`` never ends inside a character and never shows what may become a stop string; the
    tokens may therefore run ahead of it.
    """

    index: int
    """Of the first of these tokens, in the completion."""
    tokens: list[int]
    text: str
    choice: int = 0
    """Which of the n completions."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of ``tokens``, if asked for."""


class PromptLogprobs(_Event, tag="prompt_logprobs", frozen=True, kw_only=True):
    """The next tokens of the prompt and how likely the model found them."""

    index: int
    """Of the first of these tokens, in the prompt."""
    logprobs: list[TokenLogprob]


FinishReason = Literal["stop", "length", "cancelled"]


class ChoiceFinished(_Event, tag="choice_finished", frozen=True, kw_only=True):
    """One of n > 1 completions is over; ``done`` follows the last of them."""

    choice: int
    reason: FinishReason


class Done(_Event, tag="done", frozen=True, kw_only=True):
    """The completion is over; with n > 1, all of them are."""

    reason: FinishReason
    """With n > 1 ``cancelled`` or ``length`` if that is the reason of any, else ``stop``."""
    usage: Usage
    """Of all completions together; the prompt counts once."""


class Pinned(_Event, tag="pinned", frozen=True, kw_only=True):
    """Answers ``pin`` and ``unpin``."""

    model: str
    pinned: bool


class Configured(_Event, tag="config", frozen=True, kw_only=True):
    """What holds now."""

    budget_bytes: int
    granted_bytes: int
    """More than the budget, while a lower one is being worked off."""
    settings: list[Setting] = []
    """All of them, if asked for."""
    changes: list[Changed] = []
    """What came of ``settings``."""


class EventRecord(_Event, tag="record", frozen=True, kw_only=True):
    """One thing that was done, or seen."""

    seq: int
    """Counts from 1, without gaps; those before the first one that is told are forgotten."""
    at: float
    """Seconds since 1970."""
    kind: str
    """Such as ``evict``, ``reclaim_precision``, ``load_refused``."""
    model: str | None = None
    """To which it was done."""
    reason: str = ""
    requester: str | None = None
    """The model for which it was done."""
    numbers: dict[str, int] = {}
    """Bytes (``_bytes``) and levels: those that were reckoned with."""


class EventsReply(_Event, tag="events", frozen=True, kw_only=True):
    """These were all."""

    last: int
    """The number of the newest; 0: there was none."""


class Explained(_Event, tag="explain", frozen=True, kw_only=True):
    """Answers ``explain``."""

    forecast: Forecast


class Tokenized(_Event, tag="tokenized", frozen=True, kw_only=True):
    """Answers ``tokenize``."""

    count: int
    """Of all tokens."""
    tokens: list[int] = []
    """The first of them, as many as were asked for."""
    texts: list[str] = []
    """Theirs, if asked for; bytes that are no UTF-8 show as U+FFFD."""


class Cancelled(_Event, tag="cancelled", frozen=True, kw_only=True):
    """Answers ``cancel``; the target itself ends with ``done``, reason ``cancelled``."""

    target: str
    found: bool
    """False: it was over already."""


class Drained(_Event, tag="drained", frozen=True, kw_only=True):
    """Nothing runs any more."""


class ShutdownReply(_Event, tag="shutdown", frozen=True, kw_only=True):
    """The daemon exits now."""


class Error(_Event, tag="error", frozen=True, kw_only=True):
    """The request failed. An empty ``id`` speaks of the connection; it closes then."""

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
    | Tokenized
    | Cancelled
    | Drained
    | ShutdownReply
    | Error
)


def is_last(event: Event) -> bool:
    """Return whether no further event of the same request follows."""
    return not isinstance(event, _NOT_LAST)


_NOT_LAST = (
    Tokens,
    Loading,
    Accepted,
    Queued,
    Paused,
    Resumed,
    PromptLogprobs,
    ChoiceFinished,
    EventRecord,
)
