"""A limit of tokens as Anthropic's clients mean it: an upper bound.

Agents ask for up to 32,000 tokens, whatever the model's context. On Anthropic's servers such a
request runs until the context is full. The daemon refuses a request whose limit exceeds the context
or the memory. Sent again without a limit, the request gets the room that is left, which is less
than what was refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from protocol.errors import ContextTooLong, InsufficientMemory
from protocol.messages import Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.http.backend import Call, Completions
    from protocol.messages import Event, Generate


class Fitting:
    """Runs requests until the context is full, unless the prompt alone exceeds it."""

    def __init__(self, backend: Completions) -> None:
        self._backend = backend

    def generate(self, request: Generate, deliver: Callable[[Event], None]) -> Call:
        return _FittingCall(self._backend, request, deliver)


class _FittingCall:
    def __init__(
        self, backend: Completions, request: Generate, deliver: Callable[[Event], None]
    ) -> None:
        self._backend, self._request, self._deliver = backend, request, deliver
        self._call = backend.generate(request, self._handle)

    def cancel(self) -> None:
        self._call.cancel()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Error) and _exceeds_room(event):
            request = replace(self._request, max_tokens=None)
            self._call = self._backend.generate(request, self._deliver)
        else:
            self._deliver(event)


def _exceeds_room(event: Error) -> bool:
    """Return whether a request was refused because of its limit, and not of its prompt."""
    detail = event.error.detail
    match event.error.code:
        case ContextTooLong.code:
            tokens, context = detail.get("prompt_tokens"), detail.get("context_length")
            return tokens is not None and context is not None and tokens < context
        case InsufficientMemory.code:  # for this request; a load that fails has no pages
            return "page_bytes" in detail
        case _:
            return False
