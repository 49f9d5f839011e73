"""OpenAI's answers as types, with what only kvd knows under the one key ``kvd``."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

FinishReason = Literal["stop", "length"]


class Alternative(msgspec.Struct, frozen=True):
    """A token that could stand at a place of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token that stands there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a completion: lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Message(msgspec.Struct, frozen=True):
    """A chat's answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a chat's answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One whole answer."""

    index: int
    message: Message
    logprobs: Raw | None
    """`ChatLogprobs`, as JSON."""
    finish_reason: FinishReason


class ChatDelta(msgspec.Struct, frozen=True):
    """A piece of one."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextChoice(msgspec.Struct, frozen=True):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | Raw | None = None
    """Of a piece, or of the whole as JSON."""
    finish_reason: FinishReason | None = None


Choice = ChatChoice | ChatDelta | TextChoice


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Extension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only kvd knows; a key that is absent is not known (yet)."""

    seed: int | UnsetType = UNSET
    """What it was drawn with: the same request with it gives the same tokens."""
    level: int | UnsetType = UNSET
    """Of the model's KV ladder, at the end; 0 is the top."""
    levels: list[int] | UnsetType = UNSET
    """All that it ran on, in order, if it was stepped down."""
    queued_ms: int | UnsetType = UNSET
    """From its arrival until a worker had it: also how long its model was loaded for it."""
    paused_ms: int | UnsetType = UNSET
    """How long it rested for others' sake, or while its model's process was started again."""
    resumed: int | UnsetType = UNSET
    """How often it went on after that."""


class Answer(msgspec.Struct, frozen=True):
    """The whole of an answer, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    kvd: Extension | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True):
    """A model that can be named in requests."""

    id: str
    created: int
    kvd: ModelExtension
    object: Literal["model"] = "model"
    owned_by: str = "kvd"


class ModelExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only kvd knows of a model."""

    state: str
    """Such as ``ready`` or ``loading``; ``asleep``: the first request loads it."""
    context_length: int | UnsetType = UNSET
    kv: str | UnsetType = UNSET
    """The scheme that new rows start with, such as ``k8v8``."""
    source: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    """All of them."""

    data: list[Model]
    object: Literal["list"] = "list"
