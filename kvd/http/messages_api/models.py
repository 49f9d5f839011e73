"""The models in Anthropic's form, which ``/v1/models`` has for its clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.http.responses import Model
    from protocol.types import ChatAbilities

VERSION_HEADER = "anthropic-version"
"""Header that all of Anthropic's clients send."""


class Page(msgspec.Struct, frozen=True):
    """The query of a page."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None
    """Id of the model before which the page ends."""


def listed(models: Sequence[Model], page: Page) -> dict[str, Any]:
    """Return a page of these models; raises `InvalidRequest` for an unknown model in the query."""
    ids = [model.id for model in models]
    if page.before_id is not None:
        end = _place(ids, "before_id", page.before_id)
        start = max(0, end - page.limit)
        has_more = start > 0
    else:
        start = 0 if page.after_id is None else _place(ids, "after_id", page.after_id) + 1
        end = min(len(models), start + page.limit)
        has_more = end < len(models)
    shown = models[start:end]
    return {
        "data": [described(model) for model in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": has_more,
    }


def _place(ids: Sequence[str], field: str, model: str) -> int:
    if model not in ids:
        raise InvalidRequest(f"{field}: there is no model {model[:200]!r}", field=field)
    return ids.index(model)


def described(model: Model) -> dict[str, Any]:
    """Return a model. What is known only of loaded models is null for others."""
    context = None if model.context_length is msgspec.UNSET else model.context_length
    chat = model.kvd.chat
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": None if chat in (None, msgspec.UNSET) else _capabilities(chat),
        "kvd": model.kvd,
    }


def _capabilities(chat: ChatAbilities) -> dict[str, Any]:
    """Return Anthropic's names for what a chat template allows.

    All types of thinking and all efforts are accepted, whatever the model.
    """
    yes, no = {"supported": True}, {"supported": False}
    types = dict.fromkeys(("enabled", "adaptive", "disabled", "between_tools"), yes)
    levels = dict.fromkeys(("low", "medium", "high", "xhigh", "max"), yes)
    return {
        "structured_outputs": yes,
        "thinking": {"supported": bool(chat.reasoning), "types": types},
        "effort": {"supported": bool(chat.efforts), **levels},
        "context_management": no,
        "server_tools": {"supported": False, "code_execution": no, "web_search": no},
        **dict.fromkeys(("batch", "citations", "code_execution", "image_input", "pdf_input"), no),
    }
