"""Reading prompts: chunks into rows, from where a prompt read before leaves off, and their scores.

The device is idle in all of it. A request whose prompt is to be scored reads all of it, since a
checkpoint has no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvd.worker.cache.prefix import PrefixTree
from kvd.worker.completion import Request
from kvd.worker.runner import Runner
from kvd.worker.sampling.logprobs import score
from kvd.worker.text import Text
from kvd.worker.waiting import Path, Waiting, path_of
from protocol.types import PrefixUse, TokenLogprob
from protocol.worker import Report, RowPrompt, Submit


class Prompts:
    """The prompts of one engine, and the tree of those that it remembers, if it does."""

    def __init__(
        self, runner: Runner, tree: PrefixTree | None, text: Text, room: Callable[[], int]
    ) -> None:
        self._runner = runner
        self._text = text
        self._room = room
        """How many bytes of the grant nobody holds and no place needs."""
        self.tree = tree
        self._waiting = Waiting()
        self._claims: dict[str, int] = {}
        """By request, bytes that it may still need for checkpoints beyond what its place has."""
        self.claimed = 0
        """Bytes of all these, as far as the tree may hold so much."""
        self.left_early = 0
        """Running requests whose places' own checkpoints are made: they hold what was kept free."""
        self.computed = 0
        """Tokens that were read."""

    def path(self, request: Submit, prompt: list[int]) -> Path:
        """Return the names of a prompt's beginnings; none if nothing is remembered."""
        if self.tree is None:
            return ()
        return path_of(prompt, request.prefix_salt or "", self.tree.chunk)

    def expect(self, request: Request) -> None:
        """Let a request wait: prompts that are read meanwhile leave checkpoints where they part."""
        if request.path and request.submit.prompt_logprobs is None:
            request.waits = True
            self._waiting.add(request.path)

    def _expect_no_more(self, request: Request) -> None:
        if request.waits:
            request.waits = False
            self._waiting.remove(request.path)

    def forget(self, request: Request) -> None:
        """Note that a request is over, wherever it was."""
        self._expect_no_more(request)
        self._claim(request, None)
        if request.has_left:
            self.left_early -= 1
            request.has_left = False

    def is_known(self, request: Request) -> bool:
        """Return whether a beginning of a prompt that waits has come into the cache.

        False if it was asked since the last checkpoint was made.
        """
        tree = self.tree
        if tree is None or not request.waits or request.looked_at == tree.counts.stored:
            return False
        request.looked_at = tree.counts.stored
        return tree.known(request.prompt, request.salt) > 0

    def begin(self, request: Request) -> int:
        """Give a request its row; return how many of its tokens are in it already."""
        self._expect_no_more(request)
        cache, tree = self._runner.cache, self.tree
        if tree is None:
            request.row = cache.new_row()
            return 0
        parting = {chunks * tree.chunk for chunks in self._waiting.partings(request.path)}
        request.boundaries = tree.boundaries(request.prompt, request.salt, parting)
        found = 0
        if request.submit.prompt_logprobs is None:
            hit = tree.match(request.prompt, request.salt)
            found = hit.tokens
        request.row = cache.thaw(hit.frozen) if found else cache.new_row()
        request.over.cached_tokens = found
        self._claim(request, found)
        return found

    def read(self, chunks: Sequence[tuple[Request, int, int]]) -> list[Report]:
        """Run a chunk of each prompt, and leave checkpoints where they are wanted.

        In one forward pass, but for prompts that are to be scored: returns the logprobs of these.
        """
        plain = [one for one in chunks if one[0].submit.prompt_logprobs is None]
        if plain:
            rows = [request.row for request, _, _ in plain]
            tokens = [request.prompt[start:end] for request, start, end in plain]
            self._runner.prefill_group(rows, tokens)
        reports: list[Report] = []
        for request, start, end in chunks:
            if (top := request.submit.prompt_logprobs) is not None:
                reports.append(self._scored(request, start, end, top))
            self.was_read(request, start, end)
        return reports

    def was_read(self, request: Request, start: int, end: int) -> None:
        """Note that a chunk ran; leave a checkpoint if one is wanted there."""
        self.computed += end - start
        if self.tree is None or end % self.tree.chunk:
            self._claim(request, None)
            return
        # Who came since the prompt began may part from it too.
        if end in request.boundaries or self._waiting.parts_at(
            request.path, end // self.tree.chunk
        ):
            self._remember(request, end)
        self._claim(request, end)

    # Room for checkpoints: the first that a request leaves has it from the request's own place.

    def _remember(self, request: Request, end: int) -> None:
        """Leave a checkpoint; where there is no room, others go that are worth less, or none is."""
        tree = self.tree
        assert tree is not None, "boundaries are the tree's"
        tokens = request.prompt[:end]
        needed = self._needed(request, end)
        if (short := needed - self._free()) > 0:
            charge: int = self._runner.cache.checkpoint_charge(end)
            tree.evict(short, tree.worth_of(tokens, request.salt, charge))
        if self._free() < needed or not tree.insert(tokens, request.salt, request.row):
            return
        if not request.has_left:
            request.has_left = True
            self.left_early += 1

    def _free(self) -> int:
        """Return the bytes that nobody needs; a place's own checkpoint, once made, is held too."""
        return self._room() + self.left_early * self._own

    @property
    def _own(self) -> int:
        own: int = self._runner.cache.checkpoint_bytes
        return own

    def _needed(self, request: Request, end: int) -> int:
        """Return the bytes that a checkpoint takes beyond what the request's place has for one."""
        charge: int = self._runner.cache.checkpoint_charge(end)
        return charge if request.has_left else charge - self._own

    def _claim(self, request: Request, position: int | None) -> None:
        """Count anew what a request needs for checkpoints behind a position; None: nothing."""
        self._claims.pop(request.rid, None)
        if self.tree is None:
            return
        if position is not None:
            charge = self._runner.cache.checkpoint_charge
            needed = sum(charge(end) for end in request.boundaries if end > position)
            needed -= 0 if request.has_left else self._own
            if needed > 0:
                self._claims[request.rid] = needed
        total = sum(self._claims.values())
        self.claimed = min(total, self.tree.cap_bytes - self.tree.held_bytes) if total else 0

    def _scored(self, request: Request, start: int, end: int, top: int) -> Report:
        logits = self._runner.score(request.row, request.prompt[start:end])
        following = request.prompt[start + 1 : end + 1]
        scores = score(logits, mx.array(following, mx.int32), top=top > 0)
        told = [
            self._text.told(one.token, one.logprob, one.top)
            for one in scores.read([top] * len(following))
        ]
        first = self._unscored(request) if start == 0 else []
        return RowPrompt(rid=request.rid, index=start + 1 - len(first), logprobs=first + told)

    def begin_alone(self, request: Request) -> list[Report]:
        """Give a request whose prompt is one token its row; it has nothing to read."""
        request.row = self._runner.cache.new_row()
        if request.submit.prompt_logprobs is None:
            return []
        return [RowPrompt(rid=request.rid, index=0, logprobs=self._unscored(request))]

    def _unscored(self, request: Request) -> list[TokenLogprob]:
        """Return a prompt's first token, which nothing comes before."""
        return [self._text.told(request.prompt[0], None)]

    def distrust(self, request: Request) -> None:
        """Drop what a request with bad logits has read or left."""
        if self.tree is not None:
            self.tree.distrust(request.prompt, request.salt)

    def forget_lowered(self) -> None:
        """Drop checkpoints that a step-down has changed."""
        if self.tree is not None:
            self.tree.forget_below_top()

    def evict(self, wanted: int) -> int:
        """Drop checkpoints until so many bytes came free; return how many did."""
        return 0 if self.tree is None else self.tree.evict(wanted)

    @property
    def use(self) -> PrefixUse:
        """What came of remembering."""
        if self.tree is None:
            return PrefixUse()
        counts = self.tree.counts
        return PrefixUse(
            queries=counts.queries,
            query_tokens=counts.prompt_tokens,
            hit_tokens=counts.hit_tokens,
            checkpoints=len(self.tree),
            held=self.tree.held_bytes,
            evicted=counts.evicted,
        )
