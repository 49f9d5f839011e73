"""The prefix cache of one engine: which prompts leave checkpoints, and the memory for them.

A prompt's states::

    enqueue      begin_prefill        prefilled            remove
    -------> queued -------> in prefill -------> in prefill ------->
               continues from         leaves a checkpoint where
               a checkpoint           another prompt may continue

A prompt leaves checkpoints at `PrefixTree.boundaries`, and where a queued prompt diverges from it
(`kvd.worker.prefix.queued_paths`). Each admitted request reserves memory for its first checkpoint.
For further checkpoints the engine requests memory in advance (`PrefixCache.wanted_bytes`). Without
that memory, a checkpoint evicts less valuable ones, or is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.worker.prefix.lookup import Lookup, Unread
from kvd.worker.prefix.queued_paths import Path, QueuedPaths, path_of
from kvd.worker.prefix.tree import Hit, PrefixTree
from kvd.worker.scheduling.scheduler import Chunk, Scheduler
from protocol.cache_outcome import CacheOutcome, EvictionCause
from protocol.types import PrefixUse

MOST_RETRIES = 8
"""Steps that a checkpoint inside a pass waits for memory. The daemon answers within a few."""


def next_chunks(
    scheduler: Scheduler, has_new_hit: Callable[[str], bool], begin: Callable[[str, int], int]
) -> tuple[Chunk, ...]:
    """Begin prompts that the cache holds in part; return the chunks to prefill next.

    ``has_new_hit(rid)``: whether a checkpoint for the prompt was made recently. Such a prompt may
    begin ahead of the prefill order. ``begin(rid, coming)`` gives a request its row and returns the
    number of tokens that the row holds. ``coming``: prompts that will begin now, this one included.
    """
    hits = [rid for rid in scheduler.cache_candidates if has_new_hit(rid)]
    for number, rid in enumerate(hits):
        if rid in scheduler.cache_candidates:
            scheduler.skip_to(rid, begin(rid, len(hits) - number))
    while True:
        group = scheduler.next_group()
        rids = dict.fromkeys(chunk.rid for chunk in group)
        unstarted = [rid for rid in rids if not scheduler.find(rid).prompt_started]
        if not unstarted:
            return group
        # Begin one prompt at a time: the next may have to wait for what this one prefills.
        scheduler.skip_to(unstarted[0], begin(unstarted[0], len(unstarted)))


@dataclass(eq=False)
class TrackedPrompt:
    """The prompt of one request, as the prefix cache tracks it."""

    rid: str
    tokens: Sequence[int]
    salt: str
    path: Path
    full_prefill: bool
    """Whether all tokens must be prefilled, even those that the cache holds."""
    queued: bool = False
    """Whether it may still continue from a checkpoint."""
    checked_at: int = -1
    """Value of `PrefixCounts.stored` at the last search by `PrefixCache.has_new_hit`."""
    boundaries: set[int] = field(default_factory=set)
    """Token counts at which it leaves checkpoints; set when its prefill begins."""
    has_checkpoint: bool = False
    """Whether it has left the checkpoint for which its request reserves memory."""
    reads_store: bool = True
    """Whether it may continue from a segment; not after a read that failed."""
    prefetched: bool = False
    """Whether its segments were requested from the disk, or will not be while it is queued."""
    interrupted: int = 0
    """How often a reclaim has ended its read."""
    trusted: bool = False
    """Whether its request has returned good logits."""
    lowered: bool = False
    """Whether it runs below the top precision level: it neither uses nor leaves checkpoints."""
    lookup: Lookup | None = None
    """Facts from when its prefill last began."""
    unread: Unread | None = None
    """The longest stored beginning that was not read."""

    def outcome(self, held: int) -> CacheOutcome | None:
        """Return what the cache did for it. ``held``: tokens of its row when prefill begins."""
        return None if self.lookup is None else self.lookup.outcome(held, self.unread)


@dataclass(frozen=True)
class _Due:
    """A checkpoint that a prompt should leave after a pass."""

    prompt: TrackedPrompt
    end: int
    sequence: Any
    position: int | None
    """That of `PrefixCache._set_wanted`, once all checkpoints of the pass are left."""


class PrefixCache:
    """The queued and running prompts of one engine, and the tree of checkpoints.

    ``tree`` None disables the cache: nothing is stored, and nothing is found. ``reserved_bytes``:
    memory that each admitted request reserves for its first checkpoint. ``charge(tokens)``: bytes
    of a checkpoint of that length.
    """

    def __init__(
        self,
        tree: PrefixTree | None,
        reserved_bytes: int = 0,
        charge: Callable[[int], int] = lambda _tokens: 0,
    ) -> None:
        self.tree = tree
        self.reserved_bytes = reserved_bytes
        self._charge = charge
        self._queued = QueuedPaths()
        self._wanted: dict[str, int] = {}
        """Bytes that each request may still need for checkpoints, beyond its reservation."""
        self.wanted_bytes = 0
        """Sum of these bytes, limited to what the tree may still hold."""
        self._filled = 0
        """Prompts with `TrackedPrompt.has_checkpoint`."""
        self._missed: list[_Due] = []
        """Those inside the last pass that lacked memory, deeper ones of a prompt first."""
        self._retries = 0
        """Steps since that pass."""

    @property
    def filled_bytes(self) -> int:
        """Bytes of the requests' reservations that checkpoints fill."""
        return self._filled * self.reserved_bytes

    def filled_by(self, prompt: TrackedPrompt) -> int:
        """Return the part of `filled_bytes` that belongs to one request."""
        return self.reserved_bytes if prompt.has_checkpoint else 0

    def track(
        self, rid: str, tokens: Sequence[int], salt: str, *, full_prefill: bool
    ) -> TrackedPrompt:
        tree = self.tree
        path = path_of(tokens, salt, tree.chunk) if tree is not None and tree.cap_bytes else ()
        return TrackedPrompt(rid, tokens, salt, path, full_prefill)

    def enqueue(self, prompt: TrackedPrompt) -> None:
        """Queue a prompt: prompts in prefill leave checkpoints where it diverges from them."""
        if not prompt.full_prefill:
            prompt.queued = True
            self._queued.add(prompt.path)

    def _dequeue(self, prompt: TrackedPrompt) -> None:
        if prompt.queued:
            prompt.queued = False
            self._queued.remove(prompt.path)

    def remove(self, prompt: TrackedPrompt) -> None:
        """Forget the prompt of a finished request, in any state."""
        self._dequeue(prompt)
        self._missed = [one for one in self._missed if one.prompt is not prompt]
        self._set_wanted(prompt, None)
        self.release_place(prompt)

    def release_place(self, prompt: TrackedPrompt) -> None:
        """Record that a request's reservation no longer covers a checkpoint."""
        if prompt.has_checkpoint:
            prompt.has_checkpoint = False
            self._filled -= 1

    def clear(self, prompts: Iterable[TrackedPrompt]) -> None:
        """Drop all checkpoints; the reservations of the given prompts are unfilled again."""
        self._missed = []
        if self.tree is not None:
            self.tree.clear()
        for prompt in prompts:
            self.release_place(prompt)

    def has_new_hit(self, prompt: TrackedPrompt) -> bool:
        """Return whether a queued prompt has a hit.

        False, without a search, if no checkpoint was stored since the last call.
        """
        tree = self.tree
        if tree is None or not prompt.queued or prompt.lowered:
            return False
        if prompt.checked_at == tree.counts.stored:
            return False
        prompt.checked_at = tree.counts.stored
        return tree.peek(prompt.tokens, prompt.salt).tokens > 0

    def begin_prefill(self, prompt: TrackedPrompt) -> Hit:
        """Begin the prefill of a prompt; return the checkpoint to continue from."""
        self._dequeue(prompt)
        prompt.lookup = Lookup(
            len(prompt.tokens), all_for="off" if self.tree is None else "lowered"
        )
        if self.tree is None or prompt.lowered:
            return Hit(0)
        diverging = {chunks * self.tree.chunk for chunks in self._queued.divergences(prompt.path)}
        prompt.boundaries = self.tree.boundaries(prompt.tokens, prompt.salt, diverging)
        hit = Hit(0) if prompt.full_prefill else self.tree.match(prompt.tokens, prompt.salt)
        prompt.lookup = self._explain(prompt, hit, self.tree)
        self._set_wanted(prompt, hit.tokens)
        return hit

    def _explain(self, prompt: TrackedPrompt, hit: Hit, tree: PrefixTree) -> Lookup:
        if prompt.full_prefill:
            return Lookup(len(prompt.tokens), all_for="scored")
        return Lookup(
            len(prompt.tokens),
            tree.chunk,
            hit.tokens,
            tree.nearest(prompt.tokens, prompt.salt),
            tree.evictions.find(prompt.path, tree.chunk, hit.tokens),
        )

    def must_end_pass(
        self, prompt: TrackedPrompt, end: int, next_end: int, *, goes_on: bool
    ) -> bool:
        """Return whether a pass over a prompt's chunks must end at ``end`` to leave a checkpoint.

        ``next_end``: the end of the prompt's next chunk. The last tokens of a prompt often fill no
        page. Then the checkpoint before them can be left after the pass. ``goes_on``: whether the
        pass may keep tails for checkpoints. It keeps none for prompts that are prefilled
        completely, whose chunks may have passes of their own.
        """
        tree = self.tree
        if tree is None or not self.wants_checkpoint(prompt, end):
            return False
        keeps = goes_on and tree.keeps_tails and not prompt.full_prefill
        return not (keeps or tree.can_cut(next_end, end))

    def wants_checkpoint(self, prompt: TrackedPrompt, end: int) -> bool:
        """Return whether a prompt in prefill should leave a checkpoint at ``end`` tokens."""
        tree = self.tree
        if tree is None or prompt.lowered or end % tree.chunk:
            return False
        # Prompts that were queued after this one began may diverge here too.
        diverges = self._queued.diverges_at(prompt.path, end // tree.chunk)
        return end in prompt.boundaries or diverges

    def prefilled(
        self,
        prompt: TrackedPrompt,
        start: int,
        end: int,
        sequence: Any,
        spare_bytes: Callable[[], int],
    ) -> None:
        """Record that a pass prefilled a prompt from ``start`` to ``end``.

        Leaves checkpoints at those chunk ends of the pass where they are wanted and possible.
        ``sequence`` holds the prompt. The device must be idle if `SequenceSnapshots.take` needs
        that. ``spare_bytes()``: bytes of the grant that no row may need.
        """
        tree = self.tree
        if tree is None:
            return
        # The prompt ends inside a chunk, or was stepped down: no checkpoint follows.
        position = None if end % tree.chunk or prompt.lowered else end
        first = (start // tree.chunk + 1) * tree.chunk
        missed: list[_Due] = []
        for chunk_end in reversed(range(first, end + 1, tree.chunk)):  # the last one is worth most
            if self.wants_checkpoint(prompt, chunk_end) and tree.can_take(sequence, chunk_end):
                can_wait = not tree.can_cut(end, chunk_end)
                one = _Due(prompt, chunk_end, sequence, position)
                if not self._leave_checkpoint(tree, one, spare_bytes, evicts=not can_wait):
                    missed.append(one)
        self._missed += missed
        self._retries = 0
        # The memory of what is missed is requested as well.
        self._set_wanted(prompt, missed[-1].end - 1 if missed else position)

    def retry(self, spare_bytes: Callable[[], int], *, last: bool) -> None:
        """Leave the checkpoints inside the last pass that lacked memory, as far as there is some.

        Call it before each step. ``last``: whether the step forgets their tails. Then, and after
        `MOST_RETRIES` steps, they take the place of less valuable ones.
        """
        if not self._missed or self.tree is None:
            return
        self._retries += 1
        last = last or self._retries >= MOST_RETRIES
        missed, self._missed = self._missed, []
        for one in missed:
            is_there = not one.prompt.lowered and self.tree.can_take(one.sequence, one.end)
            if is_there and not self._leave_checkpoint(self.tree, one, spare_bytes, evicts=last):
                self._missed.append(one)
        still = {one.prompt.rid for one in self._missed}
        for one in missed:
            if one.prompt.rid not in still:
                self._set_wanted(one.prompt, one.position)

    def _leave_checkpoint(
        self, tree: PrefixTree, one: _Due, spare_bytes: Callable[[], int], *, evicts: bool
    ) -> bool:
        """Leave a checkpoint if memory allows; return False if memory is lacking.

        ``evicts``: whether it takes the place of less valuable ones then, or is given up.
        """
        prompt, tokens, charge = one.prompt, one.prompt.tokens[: one.end], self._charge(one.end)
        needed = charge if prompt.has_checkpoint else charge - self.reserved_bytes
        if (missing := needed - spare_bytes()) > 0:
            if not evicts:
                return False
            tree.evict(missing, "full", tree.value_of(tokens, prompt.salt, charge))
        stored = spare_bytes() >= needed and tree.insert(tokens, prompt.salt, one.sequence)
        if stored and prompt.trusted:  # its logits came before the memory
            tree.trust(tokens, prompt.salt)
        if stored and not prompt.has_checkpoint:
            prompt.has_checkpoint = True
            self._filled += 1
        return True

    def _set_wanted(self, prompt: TrackedPrompt, position: int | None) -> None:
        """Update what a prompt needs for checkpoints after ``position``; None: nothing."""
        self._wanted.pop(prompt.rid, None)
        if self.tree is None:
            return
        if position is not None:
            needed = sum(self._charge(end) for end in prompt.boundaries if end > position)
            needed -= 0 if prompt.has_checkpoint else self.reserved_bytes
            if needed > 0:
                self._wanted[prompt.rid] = needed
        total = sum(self._wanted.values())
        self.wanted_bytes = min(total, self.tree.cap_bytes - self.tree.held_bytes) if total else 0

    # Methods of the tree; without a tree they do nothing.

    def peek(self, tokens: Sequence[int], salt: str) -> Hit:
        return Hit(0) if self.tree is None else self.tree.peek(tokens, salt)

    def evict(self, wanted_bytes: int, cause: EvictionCause = "rows") -> int:
        return 0 if self.tree is None else self.tree.evict(wanted_bytes, cause)

    def trust(self, prompt: TrackedPrompt) -> None:
        if self.tree is not None:
            self.tree.trust(prompt.tokens, prompt.salt)

    def drop_untrusted(self, prompt: TrackedPrompt) -> None:
        if self.tree is not None:
            self.tree.drop_untrusted(prompt.tokens, prompt.salt)

    def drop_lowered(self, will_be: Callable[[Any], bool]) -> None:
        if self.tree is not None:
            self.tree.drop_lowered(will_be)

    def count_read(self, tokens: int) -> None:
        """Count tokens that a prompt read from the prefix store."""
        if self.tree is not None:
            self.tree.counts.disk_tokens += tokens

    @property
    def usage(self) -> PrefixUse:
        if self.tree is None:
            return PrefixUse()
        counts = self.tree.counts
        return PrefixUse(
            queries=counts.queries,
            query_tokens=counts.prompt_tokens,
            hit_tokens=counts.hit_tokens,
            disk_tokens=counts.disk_tokens,
            checkpoints=len(self.tree),
            held=self.tree.held_bytes,
            evicted=counts.evicted,
        )
