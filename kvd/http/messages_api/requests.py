"""The request types of Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``.

Unknown fields are ignored and counted: clients send new ones with every version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from kvd.http.keep_alive import KeepAlive
from protocol import fields
from protocol.fields import MAX_INT
from protocol.tools import MAX_TOOLS

ABSENT = Raw()
"""The default of fields that stay JSON."""
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]


class Block(msgspec.Struct, frozen=True):
    """A content block; ``type`` decides which of the fields it has."""

    type: str
    text: str | None = None

    # Blocks of type ``thinking``.
    thinking: str = ""
    signature: str | None = None

    # Blocks of type ``tool_use``.
    id: str = ""
    name: str = ""
    input: Raw = ABSENT

    # Blocks of type ``tool_result``.
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    """Absent or ``custom``. Others are tools of Anthropic's servers and models."""


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the answer calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


NO_THINKING = frozenset({"disabled", "between_tools"})
"""Types of thinking without reasoning. The second one is for progress reports between calls."""


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model reasons first."""

    type: str
    """Any value but those of `NO_THINKING` turns reasoning on."""
    budget_tokens: Count | None = None
    display: str | None = None
    """``omitted``: the text of the reasoning stays out of the answer."""


class Format(msgspec.Struct, frozen=True):
    """The schema that the answer matches."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """Settings of the answer."""

    effort: str | None = None
    format: Format | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/messages``, and of ``count_tokens``, which needs a part of it."""

    model: fields.Name
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    """The older name of ``output_config.format``."""
    max_tokens: Count | None = None
    """Absent: the room left in the model's context. Anthropic requires it."""
    stream: bool | None = None
    stop_sequences: fields.StopTexts | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None

    # Extensions.
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    priority: fields.Priority | None = None
    deadline_s: fields.DeadlineSeconds | None = None
    cache_salt: fields.Salt | None = None
    keep_alive: KeepAlive | None = None

    # Without effect on kvd, whose prefix cache needs no marks.
    cache_control: Raw = ABSENT
    context_management: Raw = ABSENT
    mcp_servers: Raw = ABSENT
    metadata: Raw = ABSENT
    service_tier: Raw = ABSENT
    container: Raw = ABSENT
    inference_geo: Raw = ABSENT
    speed: Raw = ABSENT
    betas: Raw = ABSENT
