"""Pages of the fake engine: names and reference counts, no keys and values.

A page has 64 tokens of a prompt. Prompts with the same beginning share its pages, so that the
prefix cache works as in the real engine (`kvd.worker.prefix.cache`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvd.worker.prefix.queued_paths import Path, path_of
from protocol.pages import PAGE_TOKENS


@dataclass(eq=False)
class Pages:
    """The pages that a row or a checkpoint references."""

    names: Path


class FakePages:
    """Implements `kvd.worker.prefix.tree.Snapshotter`; ``page_bytes`` is the size of a page."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._references: Counter[bytes] = Counter()

    def of(self, prompt: bytes, salt: str) -> Pages:
        """Return the full pages before a prompt's last token, not yet referenced."""
        return Pages(path_of(prompt, salt, PAGE_TOKENS))

    def hold(self, pages: Pages) -> None:
        self._references.update(pages.names)

    def can_cut(self, length: int, tokens: int) -> bool:
        """Return whether a row of ``length`` tokens can be taken as it was at ``tokens``."""
        return tokens <= length

    def keeps_tails(self, _chunk: int) -> bool:
        return False

    def can_take(self, sequence: Pages, tokens: int) -> bool:
        """Return whether a row can be taken as it was at this length."""
        return tokens <= len(sequence.names) * PAGE_TOKENS

    def take(self, sequence: Pages, tokens: int) -> Pages:
        """Return the pages of a row's first tokens, with a reference added."""
        snapshot = Pages(sequence.names[: tokens // PAGE_TOKENS])
        self.hold(snapshot)
        return snapshot

    def drop(self, snapshot: Pages) -> None:
        self._references -= Counter(snapshot.names)

    def unlowered(self, snapshot: Pages) -> bool:
        """Return whether there are pages; the fake engine never changes pages at a step down."""
        return bool(snapshot.names)

    def held_bytes(self, snapshot: Collection[Pages]) -> int:
        """Return the bytes that these snapshots hold; shared pages count once."""
        return self._page_bytes * len({name for one in snapshot for name in one.names})

    def freed_bytes(self, snapshot: Collection[Pages]) -> int:
        counts = Counter(name for one in snapshot for name in one.names)
        freed = sum(self._references[name] == count for name, count in counts.items())
        return self._page_bytes * freed
