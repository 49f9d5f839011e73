"""OpenAI's error objects: HTTP status, type and retry headers for each protocol error.

``code`` is OpenAI's code if it has one for the case, else kvd's. ``error.kvd`` has kvd's, and is
absent if HTTP itself refuses the request.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.errors import ErrorInfo, bounded

INVALID = "invalid_request_error"
_SERVER = "server_error"


@dataclass(eq=False)
class Refusal(Exception):
    """An error answer."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    info: ErrorInfo | None = None
    final: bool = False
    """Close the connection afterwards, because the rest of the request is unread."""

    def encoded(self) -> bytes:
        """Return the JSON object that OpenAI's clients expect."""
        error: dict[str, Any] = {
            "message": bounded(self.message),
            "type": self.type,
            "param": bounded(self.param),
            "code": self.code,
        }
        if self.info is not None:
            own = {"code": self.info.code, "retryable": self.info.retryable}
            error["kvd"] = own | ({"detail": self.info.detail} if self.info.detail else {})
        return msgspec.json.encode({"error": error}, enc_hook=str)


@dataclass(frozen=True)
class _Form:
    status: int
    type: str
    code: str | None = None
    """OpenAI's code; None: kvd's."""


_FORMS = {
    "invalid_request": _Form(400, INVALID),
    "empty_prompt": _Form(400, INVALID),
    "context_too_long": _Form(400, INVALID, "context_length_exceeded"),
    "frame_too_large": _Form(413, INVALID),
    "unknown_model": _Form(404, INVALID, "model_not_found"),
    "overloaded": _Form(429, "rate_limit_error", "rate_limit_exceeded"),
    "draining": _Form(503, _SERVER),
    "worker_died": _Form(503, _SERVER),
    "model_failed": _Form(503, _SERVER),
    "insufficient_memory": _Form(503, _SERVER),
    "deadline_exceeded": _Form(504, _SERVER),
    "invalid_model": _Form(500, _SERVER),
    "unsupported_model": _Form(500, _SERVER),
    "quarantined": _Form(500, _SERVER),
    "numerical_error": _Form(500, _SERVER),
    "slow_reader": _Form(500, _SERVER),
}

_PLAIN_CODES = {404: "not_found", 405: "method_not_allowed", 417: "expectation_failed"}
_RETRY_AFTER_S = {"overloaded": 1.0, "draining": 5.0, "worker_died": 1.0}
_FIELDS = {
    "tokens": "prompt",
    "stop_tokens": "stop_token_ids",
    "sampling.logit_bias": "logit_bias",
    "grammar": "response_format",
    "chat": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.effort": "reasoning_effort",
    "chat.max_reasoning_tokens": "thinking_budget",
    "chat.template": "chat_template_kwargs",
}
"""Protocol fields that have a different name in HTTP requests, with that name."""
_FIELD = re.compile(r"[a-z_.]+")
_NO_RETRY = frozenset({"deadline_exceeded"})
"""Errors that clients must not retry automatically, since the client's own deadline has passed."""


def of(info: ErrorInfo) -> Refusal:
    form = _FORMS.get(info.code, _Form(500, _SERVER))
    again = info.retryable and info.code not in _NO_RETRY
    # OpenAI's clients read this header before the status.
    headers = {"x-should-retry": "true" if again else "false"}
    wait_s = info.detail.get("retry_after_s", _RETRY_AFTER_S.get(info.code))
    if again and wait_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(round(1000 * wait_s))  # OpenAI's clients prefer it
    param: str | None = info.detail.get("field")
    message = info.message
    if (found := _FIELD.match(param or "")) and (name := found[0]) in _FIELDS:
        message = re.sub(rf"\b{re.escape(name)}(?=[ [])", _FIELDS[name], message, count=1)
        param = _FIELDS[name] + (param or "").removeprefix(name)
    if info.code == "unknown_model":
        param = "model"
    return Refusal(form.status, message, form.type, form.code or info.code, param, headers, info)


def unauthorized(message: str) -> Refusal:
    headers = {"WWW-Authenticate": 'Bearer realm="kvd"'}
    return Refusal(401, message, "authentication_error", "invalid_api_key", headers=headers)


def forbidden(message: str, code: str) -> Refusal:
    return Refusal(403, message, "permission_error", code)


def too_large(limit: int) -> Refusal:
    message = f"the request exceeds {limit} bytes (body_limit of [http] in config.toml)"
    return Refusal(413, message, INVALID, "request_too_large", final=True)


def too_slow(seconds: float) -> Refusal:
    message = f"the request's body did not arrive within {seconds:g} s"
    return Refusal(408, message, INVALID, "request_timeout", final=True)


def encoded(coding: str) -> Refusal:
    """Return the answer to a compressed body, whose decompressed size would be unbounded."""
    message = f"Content-Encoding {coding!r} is not supported: send it uncompressed"
    return Refusal(415, message, INVALID, "unsupported_encoding", final=True)


def plain(status: int, reason: str) -> Refusal:
    """Return the answer to an error of the HTTP library, such as an unknown path or method."""
    code = _PLAIN_CODES.get(status, "bad_request" if status < 500 else "internal")
    return Refusal(status, reason, _SERVER if status >= 500 else INVALID, code)
