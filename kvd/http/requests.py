"""OpenAI's request types, plus kvd's own settings under the names that vLLM uses.

Unknown fields are ignored and counted, since routers and SDKs add some. Those that look like a typo
are refused, because a setting without effect is noticed too late (`kvd.http.unknown_fields`).
`UNSUPPORTED` fields are refused unless they have a neutral value.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw

from kvd.http.chat_api.conversation import Message
from kvd.http.chat_api.fields import Reasoning, ToolChoice, Tools
from kvd.http.keep_alive import KeepAlive
from kvd.http.response_format import Choices, ResponseFormat, Schema, StructuredOutputs
from protocol import fields
from protocol.fields import MAX_INT, MAX_LOGPROBS, TokenId

MOST_PROMPTS = 64
"""Maximum prompts of one request for text completions."""

MOST_TOKENS = 1_000_000
"""Maximum tokens of all prompts of a request that are token ids; above any model's context."""

ABSENT = Raw()
"""The default of fields that stay JSON. Decoded, their values would take 20 times the memory."""

Tokens = Annotated[list[TokenId], Meta(max_length=MOST_TOKENS)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer. Unknown fields are ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: kvd adds none


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    REFUSES_TYPOS: ClassVar[bool] = True

    model: fields.Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: fields.Choices | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    stop: str | fields.StopTexts | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    logit_bias: fields.LogitBias | None = None
    response_format: ResponseFormat | None = None

    # Extensions.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: fields.StopTokens | None = None
    ignore_eos: bool | None = None
    priority: fields.Priority | None = None
    deadline_s: fields.DeadlineSeconds | None = None
    cache_salt: fields.Salt | None = None
    keep_alive: KeepAlive | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None

    # Without effect on kvd.
    user: Raw = ABSENT
    metadata: Raw = ABSENT
    store: Raw = ABSENT
    service_tier: Raw = ABSENT
    safety_identifier: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT

    # See UNSUPPORTED.
    use_beam_search: Raw = ABSENT
    include_stop_str_in_output: Raw = ABSENT


class ChatRequest(_Common, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    """The newer name of ``max_tokens``; takes precedence over it."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    # Extensions.
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    prediction: Raw = ABSENT  # ignored: it affects only the speed

    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    modalities: Raw = ABSENT
    audio: Raw = ABSENT
    verbosity: Raw = ABSENT
    web_search_options: Raw = ABSENT


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    MOST_VALUES: ClassVar[int] = 2 * MOST_TOKENS

    prompt: str | Annotated[list[str | TokenId | Tokens], Meta(max_length=MOST_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """0 requires ``echo``: the answer has only the prompt and its logprobs."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    suffix: Raw = ABSENT
    best_of: Raw = ABSENT


_OLD_TOOLS = "it is deprecated; use tools, tool_choice and tool_calls"
_TEXT_ONLY = "kvd generates only text"
_NO_SETTING = "models have no such setting; use the system message"
UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "functions": (_OLD_TOOLS, ([],)),
    "function_call": (_OLD_TOOLS, ("none", "auto")),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "verbosity": (_NO_SETTING, ("medium",)),
    "web_search_options": ("kvd has no web search", ()),
    "suffix": ("kvd generates only from left to right", ("",)),
    "best_of": ("request n choices with logprobs and pick the best", (1,)),
    "use_beam_search": ("kvd samples token by token", (False,)),
    "include_stop_str_in_output": ("kvd never sends stop texts", (False,)),
}
"""By field: the reason, and the neutral values that are accepted."""
