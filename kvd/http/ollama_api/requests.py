"""Ollama's request types. Unknown fields and options are ignored, as Ollama does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvd.http.chat_api.fields import Tools
from kvd.http.keep_alive import KeepAlive
from protocol import fields
from protocol.fields import MAX_INT, MAX_LOGPROBS, PositiveCount

Think = bool | Literal["low", "medium", "high"]


class Options(msgspec.Struct, frozen=True):
    """Settings of an answer; those of Ollama's runner, such as ``num_ctx``, are ignored."""

    num_predict: Annotated[int, Meta(le=MAX_INT)] | None = None
    """Maximum tokens; 0 and negative numbers: no limit but the context."""
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | fields.StopTexts | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of an earlier call."""

    name: str
    arguments: dict[str, Any] = {}


class Call(msgspec.Struct, frozen=True):
    """A call in an earlier answer."""

    function: CalledFunction
    id: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: fields.Name
    stream: bool | None = None
    """Absent: true."""
    format: str | dict[str, Any] | None = None
    """``json``, or a JSON schema."""
    options: Options | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """The body of ``POST /api/chat``."""

    messages: list[Message] | None = None
    """Absent or empty: the model is only loaded."""
    tools: Tools | None = None


class GenerateRequest(_Common, frozen=True, kw_only=True):
    """The body of ``POST /api/generate``."""

    prompt: str | None = None
    """Absent or empty: the model is only loaded."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is used without the chat template."""
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /api/embed``."""

    model: fields.Name
    input: str | list[str] = ""
    dimensions: PositiveCount | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /api/embeddings``, which is older."""

    model: fields.Name
    prompt: str = ""
    keep_alive: KeepAlive | None = None


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A body that names a model, by either field."""

    model: fields.Name | None = None
    name: fields.Name | None = None
    stream: bool | None = None
