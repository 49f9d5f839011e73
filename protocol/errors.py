"""All errors of kvd, and their codes in protocol messages."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

MAX_TEXT = 2000
"""Maximum characters of a message and of each text in its details."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of at most ``limit`` characters; a longer one loses its middle."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[len(text) - (limit - 1) // 2 :]}"


def bounded(value: Any) -> Any:
    """Return a value whose texts are short, valid UTF-8 and free of control characters.

    Messages and details may quote what a client sent or a model's folder contains: a key of
    megabytes, half a surrogate pair, or control characters that a terminal would obey.
    """
    match value:
        case str():
            escaped = _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], shorten(value))
            return shorten(escaped)
        case dict():
            return {key: bounded(item) for key, item in value.items()}
        case list() | tuple():
            return [bounded(item) for item in value]
    return value


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as a value: on the socket, from the worker, and in ``status``."""

    code: str
    """Code such as ``unknown_model``."""
    message: str
    """What happened, for people."""
    retryable: bool = False
    """Whether the same request may succeed later."""
    detail: dict[str, Any] = {}
    """Further values; the code decides which."""


_BY_CODE: dict[str, type[KvdError]] = {}


class KvdError(Exception):
    """Base of all errors. The message and the details are `bounded`."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed later without changes."""

    def __init_subclass__(cls, *, code: str | None = None, retryable: bool = False) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code, cls.retryable = code, retryable
            _BY_CODE[code] = cls

    def __init__(self, message: str, **detail: Any) -> None:
        self.message: str = bounded(message)
        self.detail: dict[str, Any] = bounded(detail)
        super().__init__(self.message)

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.retryable, self.detail)


class ProtocolError(KvdError):
    """A violation of the protocol."""


class LocalProtocolError(ProtocolError):
    """A violation by this side: a bug."""


class RemoteProtocolError(ProtocolError, code="malformed_frame"):
    """A violation by the peer. The peer gets the error, and at worst loses its connection."""


class MalformedFrame(RemoteProtocolError, code="malformed_frame"):
    """The bytes are not a message: invalid UTF-8 or JSON, not an object, or without an id."""


class FrameTooLarge(RemoteProtocolError, code="frame_too_large"):
    """A frame exceeds the limit."""


class UnknownOp(RemoteProtocolError, code="unknown_op"):
    """This version has no such op."""


class UnsupportedVersion(RemoteProtocolError, code="unsupported_version"):
    """The peer uses another version of the protocol."""


class InvalidRequest(KvdError, code="invalid_request"):
    """A field is missing, has the wrong type or is out of range; ``detail["field"]`` names it."""


class EmptyPrompt(InvalidRequest, code="empty_prompt"):
    """The prompt has no tokens."""


class ContextTooLong(InvalidRequest, code="context_too_long"):
    """Prompt and completion exceed the model's context."""


class ModelError(KvdError):
    """An error of a model rather than of one request."""


class UnknownModel(ModelError, code="unknown_model"):
    """No model of this name is loaded or can be found."""


class ModelExists(ModelError, code="model_exists"):
    """Another model has this name."""


class InvalidModel(ModelError, code="invalid_model"):
    """The model's folder is broken: a file is missing, truncated or inconsistent with others."""


class UnsupportedModel(ModelError, code="unsupported_model"):
    """The model is intact, but this version, or this machine, cannot serve it correctly."""


class ModelFailed(ModelError, code="model_failed"):
    """The model's worker failed too often; ``unload`` and ``load`` it to start again."""


class InsufficientMemory(KvdError, code="insufficient_memory"):
    """The request exceeds the memory budget; ``detail`` has the numbers in bytes."""


class UnknownRequest(KvdError, code="unknown_request"):
    """No saved request has this id: it ended, expired, or was not journaled."""


class Overloaded(KvdError, code="overloaded", retryable=True):
    """The daemon is busy; ``detail["retry_after_s"]`` says when to retry."""


class Draining(KvdError, code="draining", retryable=True):
    """The daemon or the model accepts no new work."""


class DeadlineExceeded(KvdError, code="deadline_exceeded", retryable=True):
    """The request's ``deadline_s`` has passed."""


class WorkerDied(KvdError, code="worker_died", retryable=True):
    """The model's process ended, and the request does not continue in another one."""


class Quarantined(KvdError, code="quarantined"):
    """The request made the model's process die twice, the second time while it ran alone.

    ``detail["story"]`` lists the deaths. The request is not retried; the model continues.
    """


class SlowReader(KvdError, code="slow_reader", retryable=True):
    """The client did not read its events, so its requests were cancelled."""


class NumericalError(KvdError, code="numerical_error", retryable=True):
    """The model's logits for this row were not finite, or all equal."""


class PermissionDenied(KvdError, code="permission_denied"):
    """The peer runs as another user."""


class NotRunning(KvdError, code="not_running", retryable=True):
    """No daemon answers on the socket."""


class AlreadyRunning(KvdError, code="already_running"):
    """Another daemon uses this home."""


class ConfigError(KvdError, code="config_error"):
    """The configuration is invalid; ``detail["key"]`` names the setting."""


class ServiceError(KvdError, code="service_error"):
    """The service manager, launchd or systemd, is missing or failed."""


class AgentError(KvdError, code="agent_error"):
    """A program that `kvctl launch` starts is missing or does not start."""


class DownloadFailed(KvdError, code="download_failed"):
    """`kvctl pull` could not download a model, or there is no space for it."""


class InternalError(KvdError, code="internal"):
    """A bug in kvd; the log has the traceback."""


def from_info(info: ErrorInfo) -> KvdError:
    """Return the exception for an error value; unknown codes become ``KvdError``."""
    cls = _BY_CODE.get(info.code, KvdError)
    error = cls(info.message, **info.detail)
    if cls is KvdError:
        error.code = info.code  # type: ignore[misc]
        error.retryable = info.retryable  # type: ignore[misc]
    return error
