"""The JSON of errors, by the API to which the request's path belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.http.messages_api import errors as messages_errors
from kvd.http.messages_api.models import VERSION_HEADER
from kvd.http.ollama_api import errors as ollama_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.http.errors import Refusal

    Form = Callable[[Refusal, str], tuple[int, bytes]]
    """Returns the status and the body of a refusal, for a request id that may be empty."""

_FORMS: dict[str, Form] = {
    "/v1/messages": messages_errors.encoded,
    "/api": ollama_errors.encoded,
}
"""Forms by path, which includes the paths below it. Others have OpenAI's form."""


def form_path(path: str, headers: Mapping[str, str]) -> str:
    """Return the path that decides the form: two APIs share ``/v1/models``."""
    shared = path == "/v1/models" or path.startswith("/v1/models/")
    return "/v1/messages" if shared and VERSION_HEADER in headers else path


def encoded(refusal: Refusal, path: str, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a request for this path."""
    for prefix, form in _FORMS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return form(refusal, request_id)
    return refusal.status, refusal.encoded()
