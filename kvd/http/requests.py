"""OpenAI's requests as types, with kvd's own settings beside them, under vLLM's names.

A field that is not here is refused, as OpenAI does: what is silently ignored is found out too late.
Those that change nothing here are taken and ignored; those that would and cannot (`UNSUPPORTED`)
are refused unless they say what holds anyway.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from protocol.types import (
    MAX_INT,
    MAX_LOGPROBS,
    Choices,
    DeadlineSeconds,
    LogitBias,
    Name,
    Penalty,
    Priority,
    Salt,
    StopTexts,
    StopTokens,
    TokenId,
)

MOST_PROMPTS = 64
"""In one request for completions."""

MOST_TOKENS = 1_000_000
"""Of a request's prompts that are given as tokens: more than any model's context."""

ABSENT = Raw()
"""The value of what is not read, where it is not there. JSON that nobody looks into stays bytes:
as objects it would be twenty times as much."""

Tokens = Annotated[list[TokenId], Meta(max_length=MOST_TOKENS)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream is told."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there is none


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    stop: str | StopTexts | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None

    # kvd's own.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    deadline_s: DeadlineSeconds | None = None
    cache_salt: Salt | None = None

    # They change nothing here.
    user: Raw = ABSENT
    metadata: Raw = ABSENT
    store: Raw = ABSENT
    service_tier: Raw = ABSENT
    safety_identifier: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT

    # They would; see UNSUPPORTED.
    use_beam_search: Raw = ABSENT
    include_stop_str_in_output: Raw = ABSENT
    response_format: Raw = ABSENT


class Part(msgspec.Struct, frozen=True):
    """A piece of a message; only texts are supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation.

    Other fields are ignored: clients send back the messages that they got, with all that was in
    them.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None
    tool_calls: Raw = ABSENT
    function_call: Raw = ABSENT


class ChatRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    """``max_tokens`` by its newer name; where both are given, this one holds."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    prediction: Raw = ABSENT  # it could only make an answer quicker

    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: Raw = ABSENT
    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    modalities: Raw = ABSENT
    audio: Raw = ABSENT
    reasoning_effort: Raw = ABSENT
    verbosity: Raw = ABSENT
    web_search_options: Raw = ABSENT


class CompletionRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | Annotated[list[str | TokenId | Tokens], Meta(max_length=MOST_TOKENS)]
    """A text, tokens, or a list of either: each is completed on its own."""
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """0 with ``echo``: only what is told of the prompt."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    suffix: Raw = ABSENT
    best_of: Raw = ABSENT


_NO_GRAMMAR = "kvd does not constrain what a model writes yet"
_NO_TOOLS = "kvd does not know tools yet"
_TEXT_ONLY = "kvd writes text only"
_NO_KNOB = "models are served as they are; say it in the system message"
UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "response_format": (_NO_GRAMMAR, ({"type": "text"},)),
    "tools": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": (_NO_TOOLS, (True, False)),
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "tool_calls": (_NO_TOOLS, ([],)),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "reasoning_effort": (_NO_KNOB, ()),
    "verbosity": (_NO_KNOB, ("medium",)),
    "web_search_options": ("kvd searches nothing", ()),
    "suffix": ("kvd writes from left to right only", ("",)),
    "best_of": ("ask for n and choose by logprobs", (1,)),
    "use_beam_search": ("kvd draws token by token", (False,)),
    "include_stop_str_in_output": ("stop texts are never sent", (False,)),
}
"""Why not, and which values are taken all the same since they ask for nothing."""
