"""Translates Ollama's requests to OpenAI's, from which the daemon's requests are made."""

from __future__ import annotations

from typing import Any

from kvd.http import reading, requests
from kvd.http.chat_api import conversation
from kvd.http.ollama_api.requests import (
    ChatRequest,
    GenerateRequest,
    Message,
    Options,
    Think,
)
from kvd.http.response_format import JsonSchema, ResponseFormat
from protocol.errors import InvalidRequest
from protocol.messages import Generate

TEMPERATURE = 0.8
TOP_K = 40
TOP_P = 0.9
"""Ollama's defaults."""
_NO_IMAGES = "is not supported: kvd accepts only text"


def call(request: ChatRequest | GenerateRequest, model: str) -> Generate | None:
    """Return the daemon's request; None if there is nothing to answer. Raises `InvalidRequest`.

    ``model``: the model's name in kvd.
    """
    if isinstance(request, ChatRequest):
        messages = [_message(message, number) for number, message in enumerate(_given(request))]
        extra: dict[str, Any] = {"tools": request.tools}
    else:
        _check_supported(request)
        if not request.prompt:
            return None
        if request.raw:
            return _raw(request, model)
        system = [conversation.Message("system", request.system)] if request.system else []
        messages = [*system, conversation.Message("user", request.prompt)]
        extra = {}
    if not messages:
        return None
    chat = requests.ChatRequest(
        messages=messages,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        **_thinking(request.think),
        **extra,
        **_settings(request, model),
    )
    return reading.calls(chat)[0]


def _given(request: ChatRequest) -> list[Message]:
    return request.messages or []


def _raw(request: GenerateRequest, model: str) -> Generate:
    logprobs = request.top_logprobs or 0 if request.logprobs else None
    settings = _settings(request, model)
    return reading.calls(
        requests.CompletionRequest(prompt=request.prompt or "", logprobs=logprobs, **settings)
    )[0]


def _settings(request: ChatRequest | GenerateRequest, model: str) -> dict[str, Any]:
    options = request.options or Options()
    limit = options.num_predict or 0
    return {
        "model": model,
        "response_format": _format(request.format),
        "max_tokens": limit if limit > 0 else None,
        "temperature": _first(options.temperature, TEMPERATURE),
        "top_k": _first(options.top_k, TOP_K),
        "top_p": _first(options.top_p, TOP_P),
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "keep_alive": request.keep_alive,
    }


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if isinstance(given, dict):
        return ResponseFormat("json_schema", JsonSchema(given))
    if given == "json":
        return ResponseFormat("json_object")
    if given:
        raise InvalidRequest(
            f'format must be "json" or a JSON schema, not {given[:40]!r}', field="format"
        )
    return None


def _thinking(think: Think | None) -> dict[str, Any]:
    if isinstance(think, str):
        return {"enable_thinking": True, "reasoning_effort": think}
    return {"enable_thinking": think}


def _message(message: Message, number: int) -> conversation.Message:
    if message.images:
        field = f"messages[{number}].images"
        raise InvalidRequest(f"{field} {_NO_IMAGES}", field=field)
    calls = [
        conversation.EarlierCall(
            conversation.EarlierFunction(one.function.name, one.function.arguments), one.id or None
        )
        for one in message.tool_calls or ()
    ]
    return conversation.Message(
        message.role,
        message.content or "",
        reasoning=message.thinking,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        name=message.tool_name,
    )


def _check_supported(request: GenerateRequest) -> None:
    reasons = {
        "images": _NO_IMAGES,
        "suffix": "is not supported: kvd generates only from left to right",
        "template": "is not supported: kvd uses the model's own; send raw with your own text",
        "context": "is not supported: send the conversation to /api/chat",
    }
    for field, reason in reasons.items():
        if getattr(request, field):
            raise InvalidRequest(f"{field} {reason}", field=field)
