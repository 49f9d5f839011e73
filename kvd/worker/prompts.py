"""Reading prompts: chunks into rows, from where a prompt read before leaves off, and their scores.

The device is idle in all of it. A request whose prompt is to be scored reads all of it, since a
checkpoint has no logits.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from kvd.worker.cache.prefix import PrefixTree
from kvd.worker.completion import Request
from kvd.worker.runner import Runner
from kvd.worker.sampling.logprobs import score
from kvd.worker.text import Text
from protocol.types import TokenLogprob
from protocol.worker import Report, RowPrompt


class Prompts:
    """The prompts of one engine, and the tree of those that it remembers, if it does."""

    def __init__(
        self, runner: Runner, tree: PrefixTree | None, text: Text, room: Callable[[], int]
    ) -> None:
        self._runner = runner
        self._text = text
        self._room = room
        """How many bytes of the grant nobody needs."""
        self.tree = tree

    def begin(self, request: Request) -> int:
        """Give a request its row; return how many of its tokens are in it already."""
        cache = self._runner.cache
        request.boundaries = set()
        if self.tree is None:
            request.row = cache.new_row()
            return 0
        request.boundaries = self.tree.boundaries(request.prompt, request.salt)
        if request.submit.prompt_logprobs is None:
            hit = self.tree.match(request.prompt, request.salt)
            if hit.tokens:
                request.row = cache.thaw(hit.frozen)
                found: int = hit.tokens
                return found
        request.row = cache.new_row()
        return 0

    def read(self, request: Request, start: int, end: int) -> list[Report]:
        """Run a chunk of a prompt, and leave a checkpoint where one is wanted.

        Returns the chunk's logprobs, if the request wants them.
        """
        tokens, row = request.prompt[start:end], request.row
        reports: list[Report] = []
        if (top := request.submit.prompt_logprobs) is None:
            self._runner.prefill(row, tokens)
        else:
            reports.append(self._scored(request, start, end, top))
        if request.boundaries and end in request.boundaries:
            self._remember(request, end)
        return reports

    def _remember(self, request: Request, end: int) -> None:
        """Leave a checkpoint; where the grant has no room for it, others go or it is not made."""
        assert self.tree is not None, "boundaries are the tree's"
        needed = self._runner.cache.checkpoint_bytes
        if self._room() < needed:
            self.tree.evict(needed)
        if self._room() >= needed:
            self.tree.insert(request.prompt[:end], request.salt, request.row)

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
