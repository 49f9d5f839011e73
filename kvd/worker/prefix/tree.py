"""Checkpoints of prompts: a tree of token ids with snapshots at chunk boundaries.

An edge is one chunk of ``chunk`` token ids, compared token by token. The root's children are salts,
which keep prompts of different requesters apart. Only prompts are stored, never decoded tokens. A
checkpoint is the cache's state when prefill had reached exactly that boundary, so a request that
continues from one computes bit for bit what it would have computed alone::

                          chunk 1      chunk 2      chunk 3
    salt ── "You are a" ──── o ──────────── O ──────────── O  the last boundary of one prompt
                                            └───────────── O  and of another that diverges here

    O has a checkpoint, o has none. A hit is the deepest O on a prompt's path.

One tree serves one cache: the model, its KV schemes and the chunk never change.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from kvd.worker.prefix.evicted import Evictions
from kvd.worker.prefix.lookup import Nearest, common_tokens
from kvd.worker.prefix.queued_paths import Path, edge_of, salt_digest
from kvd.worker.prefix.segment_index import Checkpoint
from protocol.cache_outcome import EvictionCause
from protocol.segments import prefix_value

SAMPLE = 64
"""Checkpoints that an eviction compares: all, or so many at random. The bytes that a checkpoint
would free are counted page by page, so comparing thousands would delay every row. The cache that
`prefix_value` follows samples 64 objects too."""

Snapshot = Any
"""A cache's snapshot of a sequence: `SequenceSnapshot` or `MlxLmSnapshot`."""


class Snapshotter(Protocol):
    """The operations on snapshots that the tree uses (`SequenceSnapshots`)."""

    def can_cut(self, length: int, tokens: int) -> bool:
        """Return whether a sequence of ``length`` tokens can be taken as it was at ``tokens``."""

    def keeps_tails(self, chunk: int) -> bool:
        """Return whether snapshots can be taken at the ends of chunks inside a pass.

        ``chunk``: tokens of these chunks.
        """

    def can_take(self, sequence: Any, tokens: int) -> bool:
        """Return whether `take` can snapshot a sequence as it was with ``tokens`` tokens."""

    def take(self, sequence: Any, tokens: int) -> Snapshot:
        """Return a snapshot of a sequence as it was at a length of ``tokens``."""

    def drop(self, snapshot: Snapshot) -> None: ...

    def unlowered(self, snapshot: Snapshot) -> bool:
        """Return whether all pages are at the precision level at which prefill wrote them."""

    def held_bytes(self, snapshot: Collection[Snapshot]) -> int:
        """Return the bytes that these snapshots hold, shared with rows or not."""

    def freed_bytes(self, snapshot: Collection[Snapshot]) -> int:
        """Return the bytes that dropping all of these snapshots would free."""


@dataclass(frozen=True)
class Hit:
    """The longest cached beginning of a prompt. Restore ``snapshot`` before any eviction."""

    tokens: int
    """Prompt tokens in the snapshot; 0: no hit."""
    snapshot: Snapshot = None


@dataclass
class PrefixCounts:
    """Queries, and checkpoints stored and dropped, since the tree was made."""

    queries: int = 0
    prompt_tokens: int = 0
    """Tokens of all queried prompts."""
    hit_tokens: int = 0
    """Tokens that hits saved from prefill."""
    disk_tokens: int = 0
    """Tokens that were read from the prefix store."""
    stored: int = 0
    evicted: int = 0
    lowered: int = 0
    trusted: int = 0
    untrusted: int = 0


@dataclass(eq=False)
class _Node:
    parent: _Node | None
    edge: bytes | str
    """The edge from the parent: a salt, or the token ids of a chunk, four bytes each."""
    depth: int
    """Tokens from the root."""
    digest: blake2b
    """Digest of the salt and all chunks from the root."""
    name: bytes = b""
    """Its value (`kvd.worker.prefix.queued_paths`), computed once: hashing 64 paths of 32K tokens
    takes 39 ms."""
    children: dict[bytes | str, _Node] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    """The edges to its children, sorted; the root, whose edges are salts, has none."""
    snapshot: Snapshot = None
    used: int = 0
    """Query count when the checkpoint was last stored or hit."""
    hits: int = 0
    trusted: bool = False
    """Whether a request that holds the checkpoint's pages has returned good logits."""


class PrefixTree:
    """The checkpoints of one cache, ``cap_bytes`` at most.

    ``chunk``: tokens of a prefill chunk. ``every``: distance in tokens between the checkpoints that
    each prompt leaves besides its last one, rounded up to whole chunks; 0: only the last one.
    ``clock``: seconds since 1970.
    """

    def __init__(
        self,
        snapshots: Snapshotter,
        chunk: int,
        every: int,
        cap_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if chunk < 1 or every < 0 or cap_bytes < 0:
            raise ValueError(
                f"chunk {chunk} must be positive, every {every} and cap_bytes {cap_bytes} not"
                " negative"
            )
        self.chunk = chunk
        self.every = -(-every // chunk) * chunk
        self.cap_bytes = cap_bytes
        self.counts = PrefixCounts()
        self.evictions = Evictions(clock)
        self._source = snapshots
        self._root = _Node(None, "", 0, salt_digest(""))
        self._stored: dict[_Node, None] = {}
        """Nodes with a checkpoint."""
        self._clock = 0
        """Queries and insertions so far; eviction measures age in these."""
        self._random = random.Random(0)  # noqa: S311 - chooses samples

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def held_bytes(self) -> int:
        """Bytes of pages, tails and states that checkpoints hold, whether or not rows do too."""
        return self._source.held_bytes(self._snapshots)

    @property
    def freeable_bytes(self) -> int:
        """Bytes that dropping all checkpoints would free: those that no running row holds."""
        return self._source.freed_bytes(self._snapshots)

    @property
    def _snapshots(self) -> list[Snapshot]:
        return [node.snapshot for node in self._stored]

    # Queries and insertions.

    def match(self, tokens: Sequence[int], salt: str = "") -> Hit:
        """Return the deepest checkpoint that is a proper prefix of a prompt, and count the query.

        The prompt's last token is never in it, because it is the first input of decode.
        """
        self._clock += 1
        self.counts.queries += 1
        self.counts.prompt_tokens += len(tokens)
        node = self._deepest(tokens, salt)
        if node is None:
            return Hit(0)
        node.used = self._clock
        node.hits += 1
        self.counts.hit_tokens += node.depth
        return Hit(node.depth, node.snapshot)

    def peek(self, tokens: Sequence[int], salt: str = "") -> Hit:
        """Return what `match` would return, without counting a query."""
        node = self._deepest(tokens, salt)
        return Hit(0) if node is None else Hit(node.depth, node.snapshot)

    def _deepest(self, tokens: Sequence[int], salt: str) -> _Node | None:
        for node in reversed(list(self._path(tokens, salt))):
            if node.snapshot is not None and self._is_valid(node):
                return node
        return None

    def nearest(self, tokens: Sequence[int], salt: str = "") -> Nearest:
        """Return the cached prompt of this salt with the longest common beginning.

        The tree knows the tokens of a prompt up to its last checkpoint.
        """
        root = self._root.children.get(salt)
        if root is None:
            return Nearest(0)
        node = [root, *self._path(tokens, salt, proper=False)][-1]
        rest = edge_of(tokens[node.depth : node.depth + self.chunk])
        if not (node.chunks and rest):
            return Nearest(node.depth)
        # A neighbour among sorted edges has the longest common beginning.
        place = bisect_left(node.chunks, rest)
        neighbours = node.chunks[max(0, place - 1) : place + 1]
        same, edge = max((common_tokens(rest, edge), edge) for edge in neighbours)
        if node.depth + same == len(tokens):
            return Nearest(len(tokens))
        cached = array("i")
        cached.frombytes(edge)
        return Nearest(node.depth + same, cached[same:])

    def boundaries(
        self, tokens: Sequence[int], salt: str = "", diverging: Collection[int] = ()
    ) -> set[int]:
        """Return the token counts at which a prompt's prefill should leave checkpoints.

        These are its last boundary, every multiple of ``every``, and the point where it leaves the
        known paths, so that the third prompt with the same beginning hits there. ``diverging``
        adds the points where queued prompts leave its path.

        Call this before the first chunk is prefilled.
        """
        last = self._last_boundary(tokens)
        known = list(self._path(tokens, salt))
        wanted = set(range(self.every, last, self.every)) if self.every else set()
        wanted |= {last, *diverging} | {node.depth for node in known[-1:]}
        return wanted - {node.depth for node in known if node.snapshot is not None} - {0}

    def can_cut(self, length: int, tokens: int) -> bool:
        """Return whether a sequence of ``length`` tokens can leave a checkpoint at ``tokens``."""
        return self._source.can_cut(length, tokens)

    @property
    def keeps_tails(self) -> bool:
        """Whether a pass over several chunks of a prompt can leave a checkpoint at each of them."""
        return self._source.keeps_tails(self.chunk)

    def can_take(self, sequence: Any, tokens: int) -> bool:
        """Return whether a sequence in prefill can leave a checkpoint at ``tokens``."""
        return self._source.can_take(sequence, tokens)

    def insert(self, tokens: Sequence[int], salt: str, sequence: Any) -> bool:
        """Snapshot a sequence as it held exactly these tokens; return whether it was stored.

        The sequence may have grown since, if `can_take`. The device must be idle if
        `SequenceSnapshots.take` needs that. Nothing is stored if a checkpoint exists there, if the
        sequence's pages were stepped down, or if it is larger than the cap.
        """
        if not tokens or len(tokens) % self.chunk:
            raise ValueError(f"{len(tokens)} tokens are not a multiple of the chunk {self.chunk}")
        for node in list(self._path(tokens, salt, proper=False))[-1:]:
            if node.depth == len(tokens) and node.snapshot is not None and self._is_valid(node):
                return False
        snapshot = self._source.take(sequence, len(tokens))
        fits = self._source.held_bytes([snapshot]) <= self.cap_bytes
        if not (fits and self._source.unlowered(snapshot)):
            self._source.drop(snapshot)
            return False
        node = self._grow_path(tokens, salt)
        node.snapshot = snapshot
        self._clock += 1
        node.used = self._clock
        self._stored[node] = None
        self.counts.stored += 1
        self.evictions.remove(node.name)
        while self.held_bytes > self.cap_bytes:
            others = [one for one in self._stored if one is not node]
            self._evict(self._least_valuable(others)[0], "full")
        return True

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints that may be written: those that are valid and trusted."""
        valid = [node for node in list(self._stored) if node.trusted and self._is_valid(node)]
        named = {node: self._names(node) for node in valid}
        longer: dict[_Node, list[bytes]] = {node: [] for node in named}
        for node, names in named.items():
            above = node.parent
            while above is not None:
                if above in longer:
                    longer[above].append(names[-1])
                above = above.parent
        return [
            Checkpoint(names, node.depth, node.hits, longer[node], node.snapshot)
            for node, names in named.items()
        ]

    def _names(self, node: _Node) -> Path:
        names: list[bytes] = []
        while node.depth and node.parent is not None:
            names.append(node.name)
            node = node.parent
        return tuple(reversed(names))

    # Eviction.

    def evict(self, wanted: int, cause: EvictionCause = "rows", below: float = math.inf) -> int:
        """Drop the least valuable checkpoints until ``wanted`` bytes are free, or none is left.

        Only checkpoints with a value (`prefix_value`) less than ``below`` are dropped. Returns the
        bytes freed. Age counts in queries and insertions. Pages that rows or other checkpoints hold
        are not freed and do not count. If there are more than `SAMPLE` checkpoints, each one is the
        least valuable of a sample. A sample without a value less than ``below`` ends the search.
        """
        freed = 0
        while freed < wanted and self._stored:
            node, node_bytes, value = self._least_valuable(list(self._stored))
            if value >= below:
                break
            freed += node_bytes
            self._evict(node, cause)
        return freed

    def value_of(self, tokens: Sequence[int], salt: str, nbytes: int) -> float:
        """Return the value of a new checkpoint of ``nbytes`` at the end of these tokens."""
        path = self._path(tokens, salt, proper=False)
        above = max((node.depth for node in path if node.snapshot is not None), default=0)
        return prefix_value(len(tokens) - above, nbytes, 0)

    def _least_valuable(self, nodes: list[_Node]) -> tuple[_Node, int, float]:
        """Return the least valuable of a sample of nodes, the bytes it frees, and its value."""
        if len(nodes) > SAMPLE:
            nodes = self._random.sample(nodes, SAMPLE)
        sizes = [(node, self._source.freed_bytes([node.snapshot])) for node in nodes]
        candidates = [(node, freed, self._value(node, freed)) for node, freed in sizes]
        return min(candidates, key=lambda candidate: candidate[2])

    def _evict(self, node: _Node, cause: EvictionCause) -> None:
        self.counts.evicted += 1
        self._drop(node, cause)

    def _value(self, node: _Node, freed: int) -> float:
        above = node.parent
        while above is not None and above.snapshot is None:
            above = above.parent
        saved = node.depth - (0 if above is None else above.depth)
        return prefix_value(saved, freed, self._clock - node.used)

    def clear(self) -> None:
        """Drop all checkpoints, because a step failed."""
        for node in list(self._stored):
            self._drop(node, "failure")

    def trust(self, tokens: Sequence[int], salt: str = "") -> None:
        """Trust the checkpoints on the path of a prompt whose request returned good logits."""
        for node in self._path(tokens, salt, proper=False):
            if node.snapshot is not None and not node.trusted:
                node.trusted = True
                self.counts.trusted += 1

    def drop_untrusted(self, tokens: Sequence[int], salt: str = "") -> None:
        """Drop the checkpoints on the path of a prompt whose request returned bad logits.

        Other branches stay: requests that continued there have logits of their own to check.
        """
        for node in list(self._path(tokens, salt, proper=False)):
            if node.snapshot is not None:
                self.counts.untrusted += 1
                self._drop(node, "untrusted")

    def drop_lowered(self, will_be: Callable[[Snapshot], bool] = lambda _: False) -> None:
        """Drop the checkpoints whose pages were stepped down, or ``will_be``.

        Without this call, `match` drops those whose pages were.
        """
        for node in list(self._stored):
            if self._is_valid(node) and will_be(node.snapshot):
                self._drop_as_lowered(node)

    def _is_valid(self, node: _Node) -> bool:
        """Return whether a checkpoint may be a hit; drop it if its pages were stepped down."""
        valid = self._source.unlowered(node.snapshot)
        if not valid:
            self._drop_as_lowered(node)
        return valid

    def _drop_as_lowered(self, node: _Node) -> None:
        self.counts.lowered += 1
        self._drop(node, "precision")

    def _drop(self, node: _Node, cause: EvictionCause) -> None:
        self._source.drop(node.snapshot)
        self.evictions.add(node.name, cause)
        node.snapshot = None
        node.trusted = False
        del self._stored[node]
        # Remove nodes that lead to no checkpoint.
        while node.parent is not None and node.snapshot is None and not node.children:
            parent = node.parent
            del parent.children[node.edge]
            if isinstance(node.edge, bytes):
                del parent.chunks[bisect_left(parent.chunks, node.edge)]
            node = parent

    # Paths.

    def _last_boundary(self, tokens: Sequence[int]) -> int:
        return (len(tokens) - 1) // self.chunk * self.chunk

    def _edges(self, tokens: Sequence[int], end: int) -> Iterator[bytes]:
        for start in range(0, end, self.chunk):
            yield edge_of(tokens[start : start + self.chunk])

    def _path(self, tokens: Sequence[int], salt: str, *, proper: bool = True) -> Iterator[_Node]:
        """Yield the known nodes on a prompt's path, the first chunk's first."""
        node = self._root.children.get(salt)
        end = self._last_boundary(tokens) if proper else len(tokens) // self.chunk * self.chunk
        for edge in self._edges(tokens, end):
            node = None if node is None else node.children.get(edge)
            if node is None:
                return
            yield node

    def _grow_path(self, tokens: Sequence[int], salt: str) -> _Node:
        """Return the node at the end of a path; create missing nodes."""
        if salt not in self._root.children:
            self._root.children[salt] = _Node(self._root, salt, 0, salt_digest(salt))
        node = self._root.children[salt]
        for edge in self._edges(tokens, len(tokens)):
            if edge not in node.children:
                digest = node.digest.copy()
                digest.update(edge)
                depth = node.depth + self.chunk
                node.children[edge] = _Node(node, edge, depth, digest, digest.digest())
                insort(node.chunks, edge)
            node = node.children[edge]
        return node
