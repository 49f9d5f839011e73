"""The response object, and the items of its output."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvd.http.responses import Extension

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
NO_LOGPROBS = Raw(b"[]")


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: Raw = NO_LOGPROBS
    """List of the tokens with their logprobs, as JSON."""


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str = ""


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    """Reasoning, for clients that show only summaries."""

    text: str = ""


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """Text for the reader."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    """The model's reasoning, either as its own summary or as content."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""
    status: ItemStatus = "in_progress"


class CustomCall(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""
    status: ItemStatus = "in_progress"


OutputItem = MessageItem | ReasoningItem | FunctionCall | CustomCall


class InputDetails(msgspec.Struct, frozen=True):
    """Details of the tokens of the prompt."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Failure(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str
    type: str
    param: str | None = None


class Incomplete(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response at some time; settings are those of the request."""

    id: str
    created_at: int
    """Seconds since 1970."""
    model: str
    status: Status = "in_progress"
    output: list[OutputItem] = []
    usage: Usage | None = None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"
    background: bool = False
    instructions: Any = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, str | None] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: Any
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None
    kvd: Extension | UnsetType = UNSET
