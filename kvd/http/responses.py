"""OpenAI's response types, plus kvd's own fields under the key ``kvd``."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvd.http.responses_api.codex import CatalogueModel
from protocol.types import ChatAbilities

FinishReason = Literal["stop", "length", "tool_calls"]


class Alternative(msgspec.Struct, frozen=True):
    """A token that the model could have generated at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token, with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a chat answer."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a text completion: lists with one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call. In chunks after the first one there is no name."""

    arguments: str
    """JSON as a text, or the next piece of it."""
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    """A call, in one piece."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call, in a chunk. Only the first chunk has id, type and name."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True):
    """A chat answer."""

    content: str | None
    """None if the answer has only calls."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """Repeats ``reasoning_content``, since clients read one or the other."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a chat answer in one chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    """None in chunks of reasoning and of calls."""
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat, in one piece."""

    index: int
    message: Message
    logprobs: Raw | None
    """`ChatLogprobs` as JSON."""
    finish_reason: FinishReason


class ChatDelta(msgspec.Struct, frozen=True):
    """One choice of a chat, in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a text completion, in one piece or in a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | Raw | None = None
    """In one piece: `TextLogprobs` as JSON."""
    finish_reason: FinishReason | None = None


Choice = ChatChoice | ChatDelta | TextChoice


class PromptDetails(msgspec.Struct, frozen=True):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Details of the completion tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Absent without reasoning."""


class Extension(msgspec.Struct, frozen=True, omit_defaults=True):
    """kvd's own fields; those without a known value are absent."""

    seed: int | UnsetType = UNSET
    """The sampling seed: the same request with this seed returns the same tokens."""
    level: int | UnsetType = UNSET
    """The KV precision level at the end; 0 is the highest precision."""
    levels: list[int] | UnsetType = UNSET
    """All precision levels of the request in order, if it was stepped down."""
    queued_ms: int | UnsetType = UNSET
    """Milliseconds from arrival until a worker accepted the request, including its model's load."""
    paused_ms: int | UnsetType = UNSET
    """Milliseconds that the request was preempted, or waited for a restart of its worker."""
    resumed: int | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
    """Why a tool call was sent as text, and which grammars were not enforced."""


class Body(msgspec.Struct, frozen=True):
    """An answer in one piece, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    kvd: Extension | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True):
    """A model that requests can name."""

    id: str
    created: int
    kvd: ModelExtension
    object: Literal["model"] = "model"
    owned_by: str = "kvd"
    context_length: int | UnsetType = UNSET
    """Maximum tokens of prompt and completion; absent until the model is loaded."""
    max_model_len: int | UnsetType = UNSET
    """Repeats ``context_length`` under vLLM's name."""


class ModelExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """kvd's own fields of a model."""

    state: str
    """The worker's state, or ``unloaded``: the first request loads the model."""
    context_length: int | UnsetType = UNSET
    kv: str | UnsetType = UNSET
    """The KV scheme of new rows, such as ``k8v8``."""
    source: str | UnsetType = UNSET
    chat: ChatAbilities | UnsetType | None = UNSET
    """What the model's chat template allows; None: it has no template."""


class ModelList(msgspec.Struct, frozen=True):
    """The body of ``GET /v1/models``."""

    data: list[Model]
    models: list[CatalogueModel]
    """Catalogue for Codex."""
    object: Literal["list"] = "list"
