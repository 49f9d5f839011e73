"""All errors of kvd, with their codes in messages.

The hierarchy (codes in brackets; * = retryable without changes)::

    KvdError
     ├── ProtocolError
     │    ├── LocalProtocolError                  by this side
     │    └── RemoteProtocolError                 by the peer
     │         ├── MalformedFrame                 [malformed_frame]
     │         ├── FrameTooLarge                  [frame_too_large]
     │         ├── UnknownOp                      [unknown_op]
     │         └── UnsupportedVersion             [unsupported_version]
     ├── InvalidRequest                           [invalid_request]
     │    ├── EmptyPrompt                         [empty_prompt]
     │    └── ContextTooLong                      [context_too_long]
     ├── ModelError
     │    ├── UnknownModel                        [unknown_model]
     │    ├── ModelExists                         [model_exists]
     │    ├── InvalidModel                        [invalid_model]
     │    ├── UnsupportedModel                    [unsupported_model]
     │    └── ModelFailed                         [model_failed]
     ├── InsufficientMemory                       [insufficient_memory]
     ├── UnknownRequest                           [unknown_request]
     ├── Overloaded                               [overloaded]          *
     ├── Draining                                 [draining]            *
     ├── DeadlineExceeded                         [deadline_exceeded]   *
     ├── WorkerDied                               [worker_died]         *
     ├── Quarantined                              [quarantined]
     ├── SlowReader                               [slow_reader]         *
     ├── NumericalError                           [numerical_error]     *
     ├── PermissionDenied                         [permission_denied]
     ├── NotRunning                               [not_running]         *
     ├── AlreadyRunning                           [already_running]
     ├── ConfigError                              [config_error]
     ├── ServiceError                             [service_error]
     └── InternalError                            [internal]
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as a value: on the socket, from the worker, and in ``status``."""

    code: str
    """Code such as ``unknown_model``."""
    message: str
    """What happened, for people."""
    retryable: bool = False
    """Whether the same request may succeed later."""
    detail: dict[str, Any] = {}
    """Further values, by error."""


class KvdError(Exception):
    """Base of all errors; ``code`` is the class's code in messages."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.retryable, self.detail)


class ProtocolError(KvdError):
    """A violation of the protocol."""


class LocalProtocolError(ProtocolError):
    """A violation by this side: a bug."""


class RemoteProtocolError(ProtocolError):
    """A violation by the peer: it gets the error, and loses its connection at most."""

    code = "malformed_frame"


class MalformedFrame(RemoteProtocolError):
    """The bytes are not a message: invalid UTF-8 or JSON, not an object, or without an id."""

    code = "malformed_frame"


class FrameTooLarge(RemoteProtocolError):
    """A frame exceeds the limit."""

    code = "frame_too_large"


class UnknownOp(RemoteProtocolError):
    """This version has no such op."""

    code = "unknown_op"


class UnsupportedVersion(RemoteProtocolError):
    """The peer uses another version of the protocol."""

    code = "unsupported_version"


class InvalidRequest(KvdError):
    """A field is missing, has the wrong type or is out of range; ``detail["field"]`` names it."""

    code = "invalid_request"


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""

    code = "empty_prompt"


class ContextTooLong(InvalidRequest):
    """Prompt and completion exceed the model's context."""

    code = "context_too_long"


class ModelError(KvdError):
    """An error of a model rather than of one request."""


class UnknownModel(ModelError):
    """No model of this name is loaded or can be found."""

    code = "unknown_model"


class ModelExists(ModelError):
    """Another model has this name."""

    code = "model_exists"


class InvalidModel(ModelError):
    """The model's folder is broken: a file is missing, truncated or inconsistent with others."""

    code = "invalid_model"


class UnsupportedModel(ModelError):
    """The model is intact, but this version cannot serve it correctly."""

    code = "unsupported_model"


class ModelFailed(ModelError):
    """The model's worker failed too often; ``unload`` and ``load`` it to start again."""

    code = "model_failed"


class InsufficientMemory(KvdError):
    """The request exceeds the memory budget; ``detail`` has the numbers in bytes."""

    code = "insufficient_memory"


class UnknownRequest(KvdError):
    """No saved request has this id: it ended, expired, or was not journaled."""

    code = "unknown_request"


class Overloaded(KvdError):
    """The daemon is busy; ``detail["retry_after_s"]`` says when to retry."""

    code = "overloaded"
    retryable = True


class Draining(KvdError):
    """The daemon or the model accepts no new work."""

    code = "draining"
    retryable = True


class DeadlineExceeded(KvdError):
    """The request's ``deadline_s`` has passed."""

    code = "deadline_exceeded"
    retryable = True


class WorkerDied(KvdError):
    """The model's process ended, and the request does not continue in another one."""

    code = "worker_died"
    retryable = True


class Quarantined(KvdError):
    """The request made the model's process die twice, the second time while it ran alone.

    ``detail["story"]`` lists the deaths. The request is not retried; the model continues.
    """

    code = "quarantined"


class SlowReader(KvdError):
    """The client did not read its events, so its requests were cancelled."""

    code = "slow_reader"
    retryable = True


class NumericalError(KvdError):
    """The model's logits for this row were not finite, or all equal."""

    code = "numerical_error"
    retryable = True


class PermissionDenied(KvdError):
    """The peer runs as another user."""

    code = "permission_denied"


class NotRunning(KvdError):
    """No daemon answers on the socket."""

    code = "not_running"
    retryable = True


class AlreadyRunning(KvdError):
    """Another daemon uses this home."""

    code = "already_running"


class ConfigError(KvdError):
    """The configuration is invalid; ``detail["key"]`` names the setting."""

    code = "config_error"


class ServiceError(KvdError):
    """The service manager, launchd or systemd, is missing or failed."""

    code = "service_error"


class InternalError(KvdError):
    """A bug in kvd; the log has the traceback."""

    code = "internal"


def _by_code(base: type[KvdError]) -> dict[str, type[KvdError]]:
    found = {base.code: base} if "code" in vars(base) else {}
    for subclass in base.__subclasses__():
        found |= _by_code(subclass)
    return found


_BY_CODE = _by_code(KvdError) | {"malformed_frame": MalformedFrame, "internal": InternalError}


def from_info(info: ErrorInfo) -> KvdError:
    """Return the exception for an error value; unknown codes become ``KvdError``."""
    cls = _BY_CODE.get(info.code, KvdError)
    error = cls(info.message, **info.detail)
    if cls is KvdError:
        error.code = info.code  # type: ignore[misc]
        error.retryable = info.retryable  # type: ignore[misc]
    return error
