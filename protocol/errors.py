"""Every error that kvd can say, with its wire code.

The tree (`code` in brackets; * = worth a retry as it is)::

    KvdError
     ├── ProtocolError
     │    ├── LocalProtocolError                  we broke the rules of a machine of ours
     │    └── RemoteProtocolError                 the peer did
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
    """An error as it travels: on the socket, from the worker, in ``status``."""

    code: str
    message: str
    retryable: bool = False
    detail: dict[str, Any] = {}


class KvdError(Exception):
    """Base of everything below; ``code`` is the wire code of the class."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def info(self) -> ErrorInfo:
        """Return the error as a value for the wire."""
        return ErrorInfo(self.code, self.message, self.retryable, self.detail)


class ProtocolError(KvdError):
    """Somebody broke the rules of a framing or session machine."""


class LocalProtocolError(ProtocolError):
    """We did: a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer did: it gets the error, and loses at most its connection."""

    code = "malformed_frame"


class MalformedFrame(RemoteProtocolError):
    """The bytes are not a message: bad UTF-8, bad JSON, not an object, no id."""

    code = "malformed_frame"


class FrameTooLarge(RemoteProtocolError):
    """A frame is larger than the limit."""

    code = "frame_too_large"


class UnknownOp(RemoteProtocolError):
    """The op is not one that this version knows."""

    code = "unknown_op"


class UnsupportedVersion(RemoteProtocolError):
    """The peer speaks another version of the protocol."""

    code = "unsupported_version"


class InvalidRequest(KvdError):
    """A field is missing, of the wrong type or out of range; ``detail["field"]`` names it."""

    code = "invalid_request"


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""

    code = "empty_prompt"


class ContextTooLong(InvalidRequest):
    """Prompt and completion do not fit the model's context."""

    code = "context_too_long"


class ModelError(KvdError):
    """Something about a model rather than about one request."""


class UnknownModel(ModelError):
    """No such model is loaded, or no such model can be found."""

    code = "unknown_model"


class ModelExists(ModelError):
    """The name is taken by another model."""

    code = "model_exists"


class InvalidModel(ModelError):
    """The model's folder is broken: a file is missing, truncated or contradicts another."""

    code = "invalid_model"


class UnsupportedModel(ModelError):
    """The model is whole, but this version cannot serve it correctly."""

    code = "unsupported_model"


class ModelFailed(ModelError):
    """The model's worker was given up; ``unload`` and ``load`` start afresh."""

    code = "model_failed"


class InsufficientMemory(KvdError):
    """It does not fit the budget; ``detail`` has the arithmetic in bytes."""

    code = "insufficient_memory"


class UnknownRequest(KvdError):
    """No request of this id waits for its client: it is over, expired, or was never kept."""

    code = "unknown_request"


class Overloaded(KvdError):
    """It would fit later; ``detail["retry_after_s"]`` says when to come back."""

    code = "overloaded"
    retryable = True


class Draining(KvdError):
    """The daemon or the model takes no new work."""

    code = "draining"
    retryable = True


class DeadlineExceeded(KvdError):
    """The time that the request gave itself (``deadline_s``) is over; it may be quicker later."""

    code = "deadline_exceeded"
    retryable = True


class WorkerDied(KvdError):
    """The model's process ended, and the request does not go on in another one."""

    code = "worker_died"
    retryable = True


class Quarantined(KvdError):
    """The model's process died of this request, twice, the second time with no other in it.

    ``detail["story"]`` tells it. It is not tried again; the model goes on.
    """

    code = "quarantined"


class SlowReader(KvdError):
    """The client did not read its events; the request was ended for the batch's sake."""

    code = "slow_reader"
    retryable = True


class NumericalError(KvdError):
    """The model's logits for this row were not finite, or all the same."""

    code = "numerical_error"
    retryable = True


class PermissionDenied(KvdError):
    """The peer is another user."""

    code = "permission_denied"


class NotRunning(KvdError):
    """No daemon answers on the socket."""

    code = "not_running"
    retryable = True


class AlreadyRunning(KvdError):
    """Another daemon holds this home."""

    code = "already_running"


class ConfigError(KvdError):
    """The configuration is wrong; ``detail["key"]`` names the place."""

    code = "config_error"


class ServiceError(KvdError):
    """The service manager, launchd or systemd, is not there or did not do it."""

    code = "service_error"


class InternalError(KvdError):
    """A bug in kvd; the log has the traceback."""

    code = "internal"


def _leaves(base: type[KvdError]) -> dict[str, type[KvdError]]:
    found = {base.code: base} if "code" in vars(base) else {}
    for sub in base.__subclasses__():
        found |= _leaves(sub)
    return found


_BY_CODE = _leaves(KvdError) | {"malformed_frame": MalformedFrame, "internal": InternalError}


def from_info(info: ErrorInfo) -> KvdError:
    """Turn a wire error back into an exception; unknown codes become ``KvdError``."""
    cls = _BY_CODE.get(info.code, KvdError)
    error = cls(info.message, **info.detail)
    if cls is KvdError:
        error.code = info.code  # type: ignore[misc]
        error.retryable = info.retryable  # type: ignore[misc]
    return error
