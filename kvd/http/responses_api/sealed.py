"""Reasoning as the ``encrypted_content`` of a reasoning item, which stateless clients send back.

The text is encoded, not encrypted: the client that gets it has already seen the reasoning. The
checksum distinguishes kvd's own items from those of other servers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_PREFIX = "kvd1."
_SUM_BYTES = 8


def seal(text: str) -> str:
    content = text.encode()
    return _PREFIX + base64.urlsafe_b64encode(_sum(content) + content).decode()


def unseal(sealed: str) -> str | None:
    """Return the text; None for what `seal` has not made."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        content = base64.b64decode(sealed[len(_PREFIX) :], altchars=b"-_", validate=True)
        text = content[_SUM_BYTES:].decode()
    except (ValueError, binascii.Error):
        return None
    return text if content[:_SUM_BYTES] == _sum(content[_SUM_BYTES:]) else None


def _sum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SUM_BYTES).digest()
