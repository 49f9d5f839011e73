"""Pages of the fake engine, as far as prompts share them: names and counts, and bytes made up.

A page is 64 tokens of a prompt, and all who have read the same up to there hold the same one. So
what is remembered of prompts goes as in the real engine (`kvd.worker.prefix.cache`), without keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvd.worker.prefix.queued_paths import Path, path_of

PAGE_TOKENS = 64


@dataclass(eq=False)
class Pages:
    """What a row or a checkpoint holds."""

    names: Path


class FakePages:
    """A cache of prompts (`kvd.worker.prefix.tree.Freezer`); a page has so many bytes."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._holds: Counter[bytes] = Counter()

    def of(self, prompt: bytes, salt: str) -> Pages:
        """Return the full pages of a prompt, which nobody holds yet; the last token is in none."""
        return Pages(path_of(prompt, salt, PAGE_TOKENS))

    def hold(self, pages: Pages) -> None:
        """Let somebody hold pages."""
        self._holds.update(pages.names)

    def snapshot(self, sequence: tuple[Pages, int]) -> Pages:
        """Return the first so many tokens of a row, held once more."""
        pages, tokens = sequence
        snapshot = Pages(pages.names[: tokens // PAGE_TOKENS])
        self.hold(snapshot)
        return snapshot

    def drop(self, snapshot: Pages) -> None:
        """Let one who held pages hold them no more."""
        self._holds -= Counter(snapshot.names)

    def unlowered(self, snapshot: Pages) -> bool:
        """Return whether pages are as they were read: nothing steps down here."""
        return bool(snapshot.names)

    def held_bytes(self, snapshot: Collection[Pages]) -> int:
        """Return the bytes of all that these hold; what they share counts once."""
        return self._page_bytes * len({name for one in snapshot for name in one.names})

    def freed_bytes(self, snapshot: Collection[Pages]) -> int:
        """Return the bytes that nobody else holds."""
        mine = Counter(name for one in snapshot for name in one.names)
        return self._page_bytes * sum(self._holds[name] == count for name, count in mine.items())
