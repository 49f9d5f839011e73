"""Prompts that were read once: a tree of token ids with frozen sequences at its chunk boundaries.

An edge is one chunk of ``chunk`` token ids, compared one by one and not by a digest; at the root a
salt keeps apart who must not see each other's prompts. Only prompts go in, never decoded tokens,
and a checkpoint is what the cache held when prefill had come to exactly that boundary. So a
request that goes on from one computes to the bit what it would have computed alone::

                          chunk 1      chunk 2      chunk 3
    salt ── "You are a" ──── o ──────────── O ──────────── O  the last boundary of one prompt
                                            └───────────── O  and of another that left its path here

    O has a checkpoint, o none: a hit is the deepest O on the way of a prompt

One tree serves one cache: its model, ladder and chunk never change.

Does not cover: who thaws, and when memory is short (`kvd.worker.core.engine`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Snapshot = Any
"""What the tree's cache freezes: `SequenceSnapshot` or `MlxLmSnapshot`."""


class Snapshotter(Protocol):
    """What the tree asks of a cache (`ModelCache`, `MlxLmCache`)."""

    def snapshot(self, sequence: Any) -> Snapshot:
        """Return what a sequence is now."""

    def drop(self, snapshot: Snapshot) -> None:
        """Give it back."""

    def unlowered(self, snapshot: Snapshot) -> bool:
        """Return whether it is still as prefilling left it."""

    def held_bytes(self, snapshot: Collection[Snapshot]) -> int:
        """Return the bytes of all that these hold, used by others or not."""

    def freed_bytes(self, snapshot: Collection[Snapshot]) -> int:
        """Return the bytes that would come free if all of these were dropped."""


@dataclass(frozen=True)
class Hit:
    """The longest known beginning of a prompt: thaw ``frozen`` before anything is evicted."""

    tokens: int
    """Of the prompt, in the frozen sequence; 0: none is known."""
    snapshot: Snapshot = None


@dataclass
class PrefixCounts:
    """What happened since the tree was made."""

    queries: int = 0
    prompt_tokens: int = 0
    """Of all queries."""
    hit_tokens: int = 0
    """Of those, the ones that need no prefill."""
    stored: int = 0
    evicted: int = 0
    """Checkpoints dropped to make room."""
    lowered: int = 0
    """Checkpoints dropped because their pages were stepped down."""
    distrusted: int = 0
    """Checkpoints dropped because a request that had read them failed."""


@dataclass(eq=False)
class _Node:
    parent: _Node | None
    edge: bytes | str
    """What leads here: a salt, then token ids of a chunk, four bytes each."""
    depth: int
    """Tokens on the way here."""
    children: dict[bytes | str, _Node] = field(default_factory=dict)
    snapshot: Snapshot = None
    used: int = 0
    """When it was stored or hit last."""


class PrefixTree:
    """The checkpoints of one cache, within ``cap_bytes``.

    ``chunk``: the grid of prefill, in tokens; ``every``: distance of the checkpoints that each
    prompt leaves beside the last one, in tokens, rounded up to whole chunks; 0: none.
    """

    def __init__(self, cache: Snapshotter, chunk: int, every: int, cap_bytes: int) -> None:
        if chunk < 1 or every < 0 or cap_bytes < 0:
            raise ValueError(f"chunk {chunk}, every {every} and cap {cap_bytes} must be positive")
        self.chunk = chunk
        self.every = -(-every // chunk) * chunk
        self.cap_bytes = cap_bytes
        self.counts = PrefixCounts()
        self._cache = cache
        self._root = _Node(None, "", 0)
        self._stored: dict[_Node, None] = {}
        """Nodes with a checkpoint."""
        self._clock = 0

    # What it holds.

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def held_bytes(self) -> int:
        """Bytes of pages, tails and states that checkpoints hold: what the cap is for.

        Pages count once, whoever else holds them; so this never grows by what others do.
        """
        return self._cache.held_bytes(self._all)

    @property
    def nbytes(self) -> int:
        """Bytes that would come free if all were dropped: what no running row holds too."""
        return self._cache.freed_bytes(self._all)

    @property
    def _all(self) -> list[Snapshot]:
        return [node.snapshot for node in self._stored]

    # Prompts come.

    def match(self, tokens: Sequence[int], salt: str = "") -> Hit:
        """Return the deepest checkpoint that is a proper prefix of a prompt, and count it as used.

        At least one token is left, to be the first that the row decodes.
        """
        self._clock += 1
        self.counts.queries += 1
        self.counts.prompt_tokens += len(tokens)
        node = self._deepest(tokens, salt)
        if node is None:
            return Hit(0)
        node.used = self._clock
        self.counts.hit_tokens += node.depth
        return Hit(node.depth, node.snapshot)

    def known(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many tokens `match` would find now; nothing is counted."""
        node = self._deepest(tokens, salt)
        return 0 if node is None else node.depth

    def found(self, tokens: Sequence[int], salt: str = "") -> Hit:
        """Return what `match` would; nothing is counted."""
        node = self._deepest(tokens, salt)
        return Hit(0) if node is None else Hit(node.depth, node.snapshot)

    def _deepest(self, tokens: Sequence[int], salt: str) -> _Node | None:
        for node in reversed(list(self._path(tokens, salt))):
            if node.snapshot is not None and self._sound(node):
                return node
        return None

    def boundaries(
        self, tokens: Sequence[int], salt: str = "", parting: Collection[int] = ()
    ) -> set[int]:
        """Return where this prompt's prefill should stop to leave a checkpoint, in tokens.

        At its last boundary, at every ``every`` tokens, and where it leaves the known paths: who
        comes third with the same beginning hits there. And at ``parting``, where prompts that are
        still to come leave its path. Ask before the first chunk.
        """
        last = self._last(tokens)
        known = list(self._path(tokens, salt))
        wanted = set(range(self.every, last, self.every)) if self.every else set()
        wanted |= {last, *parting} | {node.depth for node in known[-1:]}
        return wanted - {node.depth for node in known if node.snapshot is not None} - {0}

    def insert(self, tokens: Sequence[int], salt: str, sequence: Any) -> bool:
        """Freeze a sequence that has read exactly these tokens; return whether it is stored.

        The device must be idle. It is not if there is one already, if it was
        stepped down, or if it is larger than the cap.
        """
        if not tokens or len(tokens) % self.chunk:
            raise ValueError(f"{len(tokens)} tokens do not end on the grid of {self.chunk}")
        for node in list(self._path(tokens, salt, proper=False))[-1:]:
            if node.depth == len(tokens) and node.snapshot is not None and self._sound(node):
                return False
        snapshot = self._cache.snapshot(sequence)
        if (
            not self._cache.unlowered(snapshot)
            or self._cache.held_bytes([snapshot]) > self.cap_bytes
        ):
            self._cache.drop(snapshot)
            return False
        node = self._grown(tokens, salt)
        node.snapshot = snapshot
        self._clock += 1
        node.used = self._clock
        self._stored[node] = None
        self.counts.stored += 1
        while self.held_bytes > self.cap_bytes:
            self._evict_one(self._least_of(one for one in self._stored if one is not node)[0])
        return True

    # Checkpoints go.

    def evict(self, wanted: int, below: float = math.inf) -> int:
        """Drop the least valuable checkpoints until ``wanted`` bytes came free, or none is left.

        None that is worth ``below`` or more goes. Returns the bytes that came free. The worth of a
        checkpoint is::

            tokens saved / (bytes that come free * how long nobody asked for it)

        Tokens saved are those above the next checkpoint towards the root, where its hits would fall
        back to; time is counted in prompts, and prefixes that were asked for are asked for again
        less often the longer it is ago (hyperbolic caching, Blankstein et al., USENIX ATC 2017).
        Pages that running rows or other checkpoints hold do not come free and do not count.
        """
        freed = 0
        while freed < wanted and self._stored:
            least, bytes_, worth = self._least_of(self._stored)
            if worth >= below:
                break
            freed += bytes_
            self._evict_one(least)
        return freed

    def worth_of(self, tokens: Sequence[int], salt: str, nbytes: int) -> float:
        """Return what a new checkpoint at the end of these tokens would be worth, of this size."""
        above = 0
        for node in self._path(tokens, salt, proper=False):
            if node.snapshot is not None:
                above = node.depth
        return (len(tokens) - above) / max(1, nbytes)

    def _least_of(self, nodes: Iterable[_Node]) -> tuple[_Node, int, float]:
        """Return the least valuable one, the bytes that would come free, and its worth."""
        found = []
        for node in nodes:
            freed = self._cache.freed_bytes([node.snapshot])
            found.append((node, freed, self._worth(node, freed)))
        return min(found, key=lambda one: one[2])

    def _evict_one(self, node: _Node) -> None:
        self.counts.evicted += 1
        self._forget(node)

    def _worth(self, node: _Node, freed: int) -> float:
        above = node.parent
        while above is not None and above.snapshot is None:
            above = above.parent
        saved = node.depth - (0 if above is None else above.depth)
        return saved / (max(1, freed) * (1 + self._clock - node.used))

    def clear(self) -> int:
        """Drop everything; return the bytes that came free."""
        freed = self.nbytes
        for node in list(self._stored):
            self._forget(node)
        return freed

    def distrust(self, tokens: Sequence[int], salt: str = "") -> None:
        """Drop what is stored of a prompt whose request gave bad logits: it may come from there.

        Only what is on its way: who went on from there elsewhere has logits of its own to be
        judged by.
        """
        for node in list(self._path(tokens, salt, proper=False)):
            if node.snapshot is not None:
                self.counts.distrusted += 1
                self._forget(node)

    def forget_below_top(self) -> int:
        """Drop what was stepped down: it is no hit any more; return how many checkpoints.

        `match` finds them out too; after a step-down this gives their memory back at once.
        """
        before = len(self)
        for node in list(self._stored):
            self._sound(node)
        return before - len(self)

    def _sound(self, node: _Node) -> bool:
        """Return whether a checkpoint is a hit; drop it if not."""
        sound = self._cache.unlowered(node.snapshot)
        if not sound:
            self.counts.lowered += 1
            self._forget(node)
        return sound

    def _forget(self, node: _Node) -> None:
        self._cache.drop(node.snapshot)
        node.snapshot = None
        del self._stored[node]
        # No path stays that leads to no checkpoint.
        while node.parent is not None and node.snapshot is None and not node.children:
            del node.parent.children[node.edge]
            node = node.parent

    # Paths.

    def _last(self, tokens: Sequence[int]) -> int:
        return (len(tokens) - 1) // self.chunk * self.chunk

    def _edges(self, tokens: Sequence[int], end: int) -> Iterator[bytes]:
        for start in range(0, end, self.chunk):
            yield array("i", tokens[start : start + self.chunk]).tobytes()

    def _path(self, tokens: Sequence[int], salt: str, *, proper: bool = True) -> Iterator[_Node]:
        """Yield the known nodes on a prompt's way, its first chunk's before all."""
        node = self._root.children.get(salt)
        whole = len(tokens) // self.chunk * self.chunk
        for edge in self._edges(tokens, self._last(tokens) if proper else whole):
            node = None if node is None else node.children.get(edge)
            if node is None:
                return
            yield node

    def _grown(self, tokens: Sequence[int], salt: str) -> _Node:
        """Return the node at the end of a path, made where it was not known."""
        node = self._root.children.setdefault(salt, _Node(self._root, salt, 0))
        for edge in self._edges(tokens, len(tokens)):
            if edge not in node.children:
                node.children[edge] = _Node(node, edge, node.depth + self.chunk)
            node = node.children[edge]
        return node

    def check(self) -> None:
        """Assert the invariants."""
        assert self.held_bytes <= self.cap_bytes
        nodes = list(self._root.children.values())
        stored = set()
        while nodes:
            node = nodes.pop()
            assert node.snapshot is not None or node.children, "a path leads nowhere"
            assert all(child.parent is node for child in node.children.values())
            nodes += node.children.values()
            if node.snapshot is not None:
                stored.add(node)
        assert stored == set(self._stored), "a checkpoint is not on any path"
