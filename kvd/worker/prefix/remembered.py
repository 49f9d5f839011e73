"""What is remembered of prompts: who waits, where checkpoints are left, and the room for them.

A prompt's way::

    expect      begin            was_read          forget
    -----> waits -----> is read ---------> is read ------>
             what was read      a checkpoint, where
             before is taken    somebody will go on

Checkpoints are left where `PrefixTree.boundaries` says, and where a prompt that waits parts from
the one that is read (`kvd.worker.prefix.waiting`). The first that a request leaves has its room from the
request's own place; for the others the engine asks for memory ahead (`Remembered.claimed`). Where
it gets none, checkpoints that are worth less give way, or none is made.

Integers only: shared by the real engine and the fake one.

Does not cover: forward passes (`kvd.worker.core.prompts`), who waits for whom (`scheduling.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.worker.prefix.tree import Hit, PrefixTree
from kvd.worker.prefix.waiting import Path, Waiting, path_of
from kvd.worker.scheduling.scheduler import Chunk, Scheduler
from protocol.types import PrefixUse


def next_chunks(
    scheduler: Scheduler, is_known: Callable[[str], bool], begin: Callable[[str], int]
) -> tuple[Chunk, ...]:
    """Begin prompts where they have been read already; return the chunks that come next.

    ``is_known(rid)``: whether a beginning has come into the cache; such a prompt need not wait for
    its turn to take it. ``begin(rid)`` gives a request its row and returns the tokens in it.
    """
    for rid in scheduler.fresh:
        if is_known(rid) and rid in scheduler.fresh:
            scheduler.skip_to(rid, begin(rid))
    while True:
        group = scheduler.next_group()
        # One at a time: the next one may have to wait for what this one reads.
        fresh = next((chunk.rid for chunk in group if not scheduler.is_read(chunk.rid)), None)
        if fresh is None:
            return group
        scheduler.skip_to(fresh, begin(fresh))


@dataclass(eq=False)
class Reader:
    """One request's prompt, as far as it may be shared."""

    rid: str
    tokens: Sequence[int]
    salt: str
    path: Path
    """Names of its beginnings; empty if nothing is remembered."""
    whole: bool
    """Whether all of it must be read, whatever is known of it."""
    waits: bool = False
    """Whether it is still to be read, and can go on from a checkpoint."""
    looked_at: int = -1
    """How many checkpoints had been made when it last looked for one."""
    boundaries: set[int] = field(default_factory=set)
    """Where it is to leave checkpoints, from when it has begun."""
    has_left: bool = False
    """Whether the checkpoint that its place has room for is made."""
    lowered: bool = False
    """Whether it is read below the top of the ladder: it takes no checkpoints, and leaves none."""


@dataclass(frozen=True)
class Room:
    """What checkpoints cost, and what there is for them, in bytes."""

    free: Callable[[], int]
    """Of the grant, what nobody holds and no place needs."""
    own: int
    """What the place of each request keeps free for its first checkpoint."""
    charge: Callable[[int], int]
    """What a checkpoint takes, by its length in tokens."""


class Remembered:
    """The prompts of one engine that wait or are read, and the tree of those that were."""

    def __init__(self, tree: PrefixTree, room: Room) -> None:
        self.tree = tree
        self._room = room
        self._waiting = Waiting()
        self._claims: dict[str, int] = {}
        """By request, bytes that it may still need for checkpoints beyond what its place has."""
        self.claimed = 0
        """Bytes of all these, as far as the tree may hold so much."""
        self._left = 0
        """Requests that have left the checkpoint that their places keep room for."""

    @property
    def idle(self) -> bool:
        """Whether no request is there."""
        return not (len(self._waiting) or self._claims or self._left)

    @property
    def left_bytes(self) -> int:
        """Bytes that places keep free for checkpoints, and that these hold already."""
        return self._left * self._room.own

    def reader(self, rid: str, tokens: Sequence[int], salt: str, *, whole: bool) -> Reader:
        """Return a prompt that comes; cutting it is all that it costs here."""
        path = path_of(tokens, salt, self.tree.chunk) if self.tree.cap_bytes else ()
        return Reader(rid, tokens, salt, path, whole)

    def expect(self, reader: Reader) -> None:
        """Let a prompt wait: who is read meanwhile leaves a checkpoint where it parts from it."""
        if not reader.whole:
            reader.waits = True
            self._waiting.add(reader.path)

    def _expect_no_more(self, reader: Reader) -> None:
        if reader.waits:
            reader.waits = False
            self._waiting.remove(reader.path)

    def forget(self, reader: Reader) -> None:
        """Note that a request is over, wherever it was."""
        self._expect_no_more(reader)
        self._claim(reader, None)
        self.leave_place(reader)

    def forget_all(self, readers: Iterable[Reader]) -> None:
        """Drop all checkpoints; the places of these requests keep room for theirs again."""
        self.tree.clear()
        for reader in readers:
            self.leave_place(reader)

    def leave_place(self, reader: Reader) -> None:
        """Note that a request has no place for now; with the next one it has room for another.

        Also where its checkpoint has gone with all others.
        """
        if reader.has_left:
            reader.has_left = False
            self._left -= 1

    def left_by(self, reader: Reader) -> int:
        """Return what `left_bytes` counts of a request."""
        return self._room.own if reader.has_left else 0

    def is_known(self, reader: Reader) -> bool:
        """Return whether a beginning of a prompt that waits has come into the cache.

        False if that was asked since the last checkpoint was made.
        """
        if not reader.waits or reader.lowered or reader.looked_at == self.tree.counts.stored:
            return False
        reader.looked_at = self.tree.counts.stored
        return self.tree.known(reader.tokens, reader.salt) > 0

    def begin(self, reader: Reader) -> Hit:
        """Let a prompt be read; return what it can go on from."""
        self._expect_no_more(reader)
        if reader.lowered:
            return Hit(0)
        parting = {chunks * self.tree.chunk for chunks in self._waiting.partings(reader.path)}
        reader.boundaries = self.tree.boundaries(reader.tokens, reader.salt, parting)
        hit = Hit(0) if reader.whole else self.tree.match(reader.tokens, reader.salt)
        self._claim(reader, hit.tokens)
        return hit

    def was_read(self, reader: Reader, end: int, sequence: Any) -> None:
        """Note that a prompt is in a sequence up to ``end``; leave a checkpoint if one is wanted.

        The device must be idle.
        """
        chunks, rest = divmod(end, self.tree.chunk)
        if rest or reader.lowered:
            self._claim(reader, None)  # that was its end
            return
        # Who came since it began may part from it too.
        if end in reader.boundaries or self._waiting.parts_at(reader.path, chunks):
            self._leave(reader, end, sequence)
        self._claim(reader, end)

    # Room.

    def _leave(self, reader: Reader, end: int, sequence: Any) -> None:
        tokens, charge = reader.tokens[:end], self._room.charge(end)
        needed = charge if reader.has_left else charge - self._room.own
        if (short := needed - self._room.free()) > 0:
            self.tree.evict(short, self.tree.worth_of(tokens, reader.salt, charge))
        if self._room.free() < needed or not self.tree.insert(tokens, reader.salt, sequence):
            return
        if not reader.has_left:
            reader.has_left = True
            self._left += 1

    def _claim(self, reader: Reader, position: int | None) -> None:
        """Count anew what a prompt needs for checkpoints behind a position; None: nothing."""
        self._claims.pop(reader.rid, None)
        if position is not None:
            coming = [end for end in reader.boundaries if end > position]
            needed = sum(map(self._room.charge, coming))
            needed -= 0 if reader.has_left else self._room.own
            if needed > 0:
                self._claims[reader.rid] = needed
        total = sum(self._claims.values())
        self.claimed = min(total, self.tree.cap_bytes - self.tree.held_bytes) if total else 0

    @property
    def use(self) -> PrefixUse:
        """What came of it."""
        counts = self.tree.counts
        return PrefixUse(
            queries=counts.queries,
            query_tokens=counts.prompt_tokens,
            hit_tokens=counts.hit_tokens,
            checkpoints=len(self.tree),
            held=self.tree.held_bytes,
            evicted=counts.evicted,
        )
