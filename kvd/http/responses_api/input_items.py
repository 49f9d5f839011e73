"""Pages of a stored response's input items: ``GET /v1/responses/{id}/input_items``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Named(msgspec.Struct, frozen=True):
    id: Raw = Raw(b"null")


class Page(msgspec.Struct, frozen=True):
    """The query of a page."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the item after which the page begins."""


def listed(items: Sequence[Raw], response_id: str, page: Page) -> bytes:
    """Return a page of these items, oldest first, as JSON; raises `InvalidRequest` for ``after``.

    Items without an id get one that later pages know.
    """
    own = response_id.removeprefix("resp_")
    # Only the items of the page are decoded: all of 16,000 took 90 ms of CPU time.
    ids = [_id(item) or f"in_{own}_{number}" for number, item in enumerate(items)]
    order = range(len(items)) if page.order == "asc" else range(len(items))[::-1]
    start = 0
    if page.after is not None:
        if page.after not in ids:
            raise InvalidRequest(
                f"after: the response has no input item {page.after!r}", field="after"
            )
        start = order.index(ids.index(page.after)) + 1
    data = [_shown(items[number], ids[number]) for number in order[start : start + page.limit]]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": start + page.limit < len(items),
        }
    )


def _id(item: Raw) -> str:
    """Return the item's own id; empty if it has none."""
    given = _plain(msgspec.json.decode(item, type=_Named).id)
    return given if isinstance(given, str) else ""


def _shown(item: Raw, item_id: str) -> dict[str, Any]:
    """Return an item with its id and, if it is a message, its type and content parts."""
    found: dict[str, Any] = msgspec.json.decode(item, type=dict[str, Raw])
    found["id"] = item_id
    if _plain(found.get("type")) in (None, "message"):
        found["type"] = "message"
        found.setdefault("status", "completed")
        if isinstance(text := _plain(found.get("content")), str):
            kind = "output_text" if _plain(found.get("role")) == "assistant" else "input_text"
            part = {"type": kind, "text": text}
            found["content"] = [part | {"annotations": []} if kind == "output_text" else part]
    return found


def _plain(value: Raw | None) -> Any:
    """Return a value decoded; None for one that has no value in Python, such as 1e999."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value)
    except ValueError:
        return None
