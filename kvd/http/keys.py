"""API keys: shown once when created, stored as hashes.

A key has 256 random bits and cannot be guessed, so a fast hash is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

_PREFIX = "kvd-"
"""Lets people and secret scanners recognize the key."""


def make() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def owner(key: str, keys: Mapping[str, str]) -> str | None:
    """Return the name of this key, or None, in constant time."""
    given = hashed(key)
    found = [name for name, known in keys.items() if hmac.compare_digest(given, known)]
    return found[-1] if found else None
