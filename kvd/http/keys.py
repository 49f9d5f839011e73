"""API keys: made once, shown once, kept as hashes.

A key has 256 random bits, so a plain hash is enough: there is nothing to guess, and a slow hash
would only make each request slow.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

_PREFIX = "kvd-"
"""So that people and scanners of secrets see what it is."""


def make() -> str:
    """Return a new key."""
    return _PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    """Return what the configuration has of a key."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def owner(key: str, keys: Mapping[str, str]) -> str | None:
    """Return the name of this key, or None; takes as long whichever it is."""
    given, found = hashed(key), None
    for name, known in keys.items():
        if hmac.compare_digest(given, known):
            found = name
    return found
