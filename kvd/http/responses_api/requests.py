"""The request types of ``POST /v1/responses``.

Agents send fields that change from version to version, so unknown fields are ignored and counted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from kvd.http.keep_alive import KeepAlive
from protocol import fields
from protocol.fields import MAX_INT
from protocol.tools import MAX_GRAMMAR_CHARS

ABSENT = Raw()
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]


class Reasoning(msgspec.Struct, frozen=True):
    """Settings of the model's reasoning."""

    effort: str | None = None
    """``none`` turns it off, if the model's template has a switch."""
    summary: str | None = None
    """If set, the reasoning is sent as its own summary, which is what clients show."""


class TextFormat(msgspec.Struct, frozen=True):
    """What the answer's text must match."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class Text(msgspec.Struct, frozen=True):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/responses``, with kvd's extensions."""

    model: fields.Name
    input: str | list[Raw] = []
    instructions: str | list[Raw] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    # Extensions.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: fields.Priority | None = None
    deadline_s: fields.DeadlineSeconds | None = None
    cache_salt: fields.Salt | None = None
    keep_alive: KeepAlive | None = None

    # Accepted without effect.
    stream_options: Raw = ABSENT
    service_tier: Raw = ABSENT
    truncation: Raw = ABSENT
    max_tool_calls: Raw = ABSENT
    client_metadata: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT
    prompt_cache_options: Raw = ABSENT

    # Refused unless neutral, because the answer would be wrong without them.
    conversation: Raw = ABSENT
    prompt: Raw = ABSENT


REFUSED = {
    "conversation": "use previous_response_id, or send the whole conversation in input",
    "prompt": "send the prompt's text in instructions and input",
}
"""By field: what to do instead."""


class Content(msgspec.Struct, frozen=True):
    """A part of a message, of a tool's output, or of reasoning."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, frozen=True):
    """An input item of any kind that kvd reads; the type says which fields it has."""

    type: str = "message"
    id: str | None = None
    role: str = ""
    content: str | list[Content] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[Content] | None = None
    summary: list[Content] | None = None
    encrypted_content: str | None = None
    tools: list[Raw] = []


class ToolFormat(msgspec.Struct, frozen=True):
    """What a custom tool's input must match."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] = "lark"
    definition: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""


class RequestTool(msgspec.Struct, frozen=True):
    """A tool of a kind that kvd knows: function, custom or namespace."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: ToolFormat | None = None
    tools: list[Raw] = []


class Kind(msgspec.Struct, frozen=True):
    """The type of an item or a tool whose other fields are not read yet."""

    type: str | None = None
    role: str | None = None
