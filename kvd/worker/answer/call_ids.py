"""Ids of calls: the same in every worker that replays a request."""

from __future__ import annotations

import hashlib
from string import ascii_letters, digits

_LETTERS = digits + ascii_letters
ID_LENGTH = 9
"""Letters and digits of an id, as Mistral's templates demand."""


def call_id(rid: str, choice: int, number: int) -> str:
    """Return the id of a choice's call, ``number`` from 0: a digest of all three."""
    return short_id(f"{rid}\0{choice}\0{number}")


def short_id(text: str) -> str:
    """Return an id of `ID_LENGTH` letters and digits: a digest of a text."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
    value = int.from_bytes(digest, "big")
    letters = []
    for _ in range(ID_LENGTH):
        value, at = divmod(value, len(_LETTERS))
        letters.append(_LETTERS[at])
    return "".join(letters)
