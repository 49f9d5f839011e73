"""Counts which prompt beginnings queued requests share, to place checkpoints where they diverge.

Each prompt is cut once, on arrival, into prefill chunks. Its *path* names each beginning of whole
chunks with a digest of the salt and all tokens so far. The counter records how many queued prompts
contain each name. A prompt being prefilled should leave a checkpoint where a queued prompt diverges
from it, because that is the deepest point from which the queued prompt can continue::

    in prefill  --o-----o-----O-----o-----o      O: the third chunk's name is counted once
    queued      --o-----o-----O                     more than the fourth's

A name is only a hint: the prefix tree compares tokens before a checkpoint is used. Each test takes
two lookups, regardless of the length of the queue.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Path = tuple[bytes, ...]
"""Digests of a prompt's beginnings: its first chunk, its first two chunks, and so on."""


def path_of(tokens: Sequence[int], salt: str, chunk: int) -> Path:
    """Return a prompt's path: the whole chunks before its last token, which is not prefilled."""
    edges = (edge_of(tokens[end - chunk : end]) for end in range(chunk, len(tokens), chunk))
    return names_of(salt, edges)


def edge_of(tokens: Sequence[int]) -> bytes:
    """Return the token ids of a chunk, four bytes each."""
    return array("i", tokens).tobytes()


def salt_digest(salt: str) -> blake2b:
    """Return the digest that the chunks of a prompt with this salt continue."""
    # A salt may consist of the bytes of a chunk, so it is hashed by itself first.
    return blake2b(blake2b(salt.encode("utf-8", "surrogatepass")).digest(), digest_size=16)


def names_of(salt: str, edges: Iterable[bytes]) -> Path:
    """Return the path of the prompt that consists of these chunks."""
    digest = salt_digest(salt)
    names = []
    for edge in edges:
        digest.update(edge)
        names.append(digest.digest())
    return tuple(names)


class QueuedPaths:
    """The paths of all queued prompts."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def add(self, path: Path) -> None:
        self._counts.update(path)

    def remove(self, path: Path) -> None:
        for name in path:
            if self._counts[name] == 1:
                del self._counts[name]
            else:
                self._counts[name] -= 1

    def diverges_at(self, path: Path, chunks: int) -> bool:
        """Return whether a queued prompt shares exactly the first ``chunks`` chunks of a path."""
        if not 0 < chunks <= len(path):
            return False
        longer = self._counts[path[chunks]] if chunks < len(path) else 0
        return self._counts[path[chunks - 1]] > longer

    def divergences(self, path: Path) -> set[int]:
        """Return every number of chunks for which `diverges_at` is true."""
        return {chunks for chunks in range(1, len(path) + 1) if self.diverges_at(path, chunks)}
