"""Signatures of thinking blocks.

Clients send thinking blocks back, and some refuse blocks without a signature. kvd trusts its
clients with the text, so its signature is a checksum. If the text is omitted from the answer, the
signature carries it, so that the next request can return it to the chat template.
"""

from __future__ import annotations

import base64
import hashlib

_CHECKSUM = "kvd1."
_TEXT = "kvd2."


def sign(text: str, *, omitted: bool = False) -> str:
    """Return the signature of a block; with ``omitted``, it holds the text itself."""
    if omitted:
        return _TEXT + base64.b64encode(text.encode()).decode()
    return (
        _CHECKSUM
        + base64.b64encode(hashlib.blake2b(text.encode(), digest_size=16).digest()).decode()
    )


def text_of(thinking: str, signature: str | None) -> str:
    """Return a block's reasoning: its own text, or what kvd's signature holds.

    Signatures are not verified: clients change blocks, drop their signature, or continue the
    conversation of another server.
    """
    if thinking or signature is None or not signature.startswith(_TEXT):
        return thinking
    try:
        return base64.b64decode(signature.removeprefix(_TEXT), validate=True).decode()
    except ValueError:  # damaged; the conversation is still usable without it
        return ""
