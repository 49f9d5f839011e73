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
    note = False
    """Whether the last message ends with a note."""
    for message in messages:
        last = placed[-1] if placed else None
        if message.role == "system" and not (late and system):
            if last is not None and last.role == "system":
                placed[-1] = _joined(last, message)
            elif last is None and system:
                placed.append(message)
            elif last is not None and last.role == "user":
                placed[-1], note = _joined(last, message), True
            else:
                placed.append(replace(message, role="user"))
                note = True
        elif message.role == "user" and note and last is not None:
            placed[-1], note = _joined(last, message), False
        else:
            placed.append(message)
            note = False
    return placed


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(first, content=f"{first.content}\n\n{second.content}")
