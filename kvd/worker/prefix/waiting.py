"""Prompts that wait to be read, and where others part from them.

Each is cut once, when it comes, on the grid of prefill: its *path* has a name for each beginning of
whole chunks, a digest that is the same for all prompts with that beginning and that salt. Counting
how many who wait pass through each name tells where a prompt that is being read should leave a
checkpoint: where it parts from somebody who waits, which is as deep as that one can go on from. ::

    read now   --o-----o-----O-----o-----o        O: one more waits behind the third chunk's name
    waits      --o-----o-----O                       than behind the fourth's

A name is a hint, never a proof: what is in the cache is compared token by token (`cache.prefix`).
Two lookups tell it, however many wait.

Does not cover: who waits for whom (`kvd.worker.scheduling.sharing`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

Path = tuple[bytes, ...]
"""Names of a prompt's beginnings: of its first chunk, its first two, and so on."""

_NAME_BYTES = 16


def path_of(tokens: Sequence[int], salt: str, chunk: int) -> Path:
    """Return a prompt's path: the whole chunks before its last token, which is not prefilled."""
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_NAME_BYTES)
    names = []
    for end in range(chunk, len(tokens), chunk):
        digest.update(array("i", tokens[end - chunk : end]).tobytes())
        names.append(digest.digest())
    return tuple(names)


class Waiting:
    """The paths of all who wait."""

    def __init__(self) -> None:
        self._through: Counter[bytes] = Counter()

    def add(self, path: Path) -> None:
        """Let a prompt wait."""
        self._through.update(path)

    def remove(self, path: Path) -> None:
        """Forget a prompt that waited: it is read now, or never."""
        for name in path:
            if self._through[name] == 1:
                del self._through[name]
            else:
                self._through[name] -= 1

    def parts_at(self, path: Path, chunks: int) -> bool:
        """Return whether somebody who waits has just so many first chunks in common with a path."""
        if not 0 < chunks <= len(path):
            return False
        beyond = self._through[path[chunks]] if chunks < len(path) else 0
        return self._through[path[chunks - 1]] > beyond

    def partings(self, path: Path) -> set[int]:
        """Return all such numbers of chunks."""
        return {chunks for chunks in range(1, len(path) + 1) if self.parts_at(path, chunks)}

    def __len__(self) -> int:
        """Return how many names those who wait have, for tests: none when nobody does."""
        return len(self._through)
