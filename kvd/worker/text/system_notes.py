"""System messages where a chat template does not allow them: notes of the user in their place.

Messages are never moved to the beginning, because that would change the prompt's cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.types import ChatMessage


def place(messages: Sequence[ChatMessage], *, system: bool, late: bool) -> list[ChatMessage]:
    """Return the messages with all system messages that the template refuses as notes.

    ``system``: whether a system message may come first. ``late``: whether others may follow later.
    A note is joined with the user's messages next to it, since many templates want roles to
    alternate.
    """
    placed: list[ChatMessage] = []
    texts: list[list[str]] = []
    """The contents of each placed message, joined at the end: their number has no limit."""
    note = False
    """Whether the last message ends with a note."""
    for message in messages:
        last = placed[-1] if placed else None
        refused = message.role == "system" and not (late and system)
        joins = last is not None and (
            (refused and last.role in ("system", "user")) or (message.role == "user" and note)
        )
        if joins:
            texts[-1].append(message.content)
        else:
            keeps = not refused or (last is None and system)
            placed.append(message if keeps else replace(message, role="user"))
            texts.append([message.content])
        note = refused and placed[-1].role == "user"
    return [
        message if len(parts) == 1 else replace(message, content="\n\n".join(parts))
        for message, parts in zip(placed, texts, strict=True)
    ]
