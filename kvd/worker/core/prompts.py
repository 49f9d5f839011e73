"""Reading prompts: chunks into rows, from where a prompt read before leaves off, and their scores.

The device is idle in all of it. A request whose prompt is to be scored reads all of it, since a
checkpoint has no logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from kvd.worker.core.request import Request
from kvd.worker.prefix.remembered import Reader, Remembered
from kvd.worker.prefix.tree import Hit, PrefixTree
from kvd.worker.sampling.logprobs import score
from kvd.worker.sampling.sampler import finite_and_varied
from kvd.worker.serving.runner import Runner
from kvd.worker.text.text import Text
from protocol.types import PrefixUse, TokenLogprob
from protocol.worker import Report, RowPrompt, Submit


class Prompts:
    """The prompts of one engine, and the tree of those that it remembers, if it does."""

    def __init__(self, runner: Runner, remembered: Remembered | None, text: Text) -> None:
        self._runner = runner
        self._text = text
        self.remembered = remembered
        self.computed = 0
        """Tokens that were read."""

    @property
    def tree(self) -> PrefixTree | None:
        """The checkpoints."""
        return None if self.remembered is None else self.remembered.tree

    @property
    def left_bytes(self) -> int:
        """Bytes that places keep free for checkpoints, and that these hold already."""
        return 0 if self.remembered is None else self.remembered.left_bytes

    def left_by(self, request: Request) -> int:
        """Return what `left_bytes` counts of a request."""
        return 0 if self.remembered is None else self.remembered.left_by(request.reader)

    def reader(self, request: Submit, prompt: list[int]) -> Reader:
        """Return a new request's prompt, as far as it may be shared."""
        salt, whole = request.prefix_salt or "", request.prompt_logprobs is not None
        if self.remembered is None:
            return Reader(request.rid, prompt, salt, (), whole)
        return self.remembered.reader(request.rid, prompt, salt, whole=whole)

    def expect(self, request: Request) -> None:
        """Let a request wait: prompts that are read meanwhile leave checkpoints where they part."""
        if self.remembered is not None:
            self.remembered.expect(request.reader)

    def forget(self, request: Request) -> None:
        """Note that a request is over, wherever it was."""
        if self.remembered is not None:
            self.remembered.forget(request.reader)

    def leave_place(self, request: Request) -> None:
        """Note that a request has no place for now: it was parked."""
        if self.remembered is not None:
            self.remembered.leave_place(request.reader)

    def forget_all(self, requests: Iterable[Request]) -> None:
        """Drop all checkpoints; the places of these requests keep room for theirs again."""
        if self.remembered is not None:
            self.remembered.forget_all(request.reader for request in requests)

    def is_known(self, request: Request) -> bool:
        """Return whether a beginning of a prompt that waits has come into the cache since asked."""
        return self.remembered is not None and self.remembered.is_known(request.reader)

    def begin(self, request: Request) -> int:
        """Give a request its row; return how many of its tokens are in it already."""
        cache = self._runner.cache
        hit = Hit(0) if self.remembered is None else self.remembered.begin(request.reader)
        request.row = cache.restore(hit.snapshot) if hit.tokens else cache.new_row(request.level)
        if request.resumed_at is None:
            request.over.cached_tokens = hit.tokens
        return hit.tokens

    def read(self, chunks: Sequence[tuple[Request, int, int]]) -> list[Report]:
        """Run a chunk of each prompt, and leave checkpoints where they are wanted.

        In one forward pass, but for prompts that are to be scored: returns the logprobs of these;
        of one whose logits are bad nothing, and it is `Request.distrusted`.
        """
        for request, _, _ in chunks:
            if request.row is None:  # it was begun, and lost its row before anything was in it
                request.row = self._runner.cache.new_row(request.level)
        plain = [one for one in chunks if one[0].submit.prompt_logprobs is None]
        if plain:
            rows = [request.row for request, _, _ in plain]
            tokens = [request.prompt[start:end] for request, start, end in plain]
            self._runner.prefill_group(rows, tokens)
        reports: list[Report] = []
        for request, start, end in chunks:
            if (top := request.submit.prompt_logprobs) is not None:
                reports += self._scored(request, start, end, top)
            if not request.distrusted:
                self.was_read(request, start, end)
        return reports

    def was_read(self, request: Request, start: int, end: int) -> None:
        """Note that a chunk ran; leave a checkpoint if one is wanted there."""
        self.computed += end - start
        if self.remembered is not None:
            self.remembered.was_read(request.reader, end, request.row)

    def _scored(self, request: Request, start: int, end: int, top: int) -> list[Report]:
        logits = self._runner.score(request.row, request.prompt[start:end])
        if not finite_and_varied(logits).all().item():
            request.distrusted = True
            return []
        following = request.prompt[start + 1 : end + 1]
        scores = score(logits, mx.array(following, mx.int32), top=top > 0)
        told = [
            self._text.told(one.token, one.logprob, one.top)
            for one in scores.read([top] * len(following))
        ]
        first = self._unscored(request) if start == 0 else []
        return _untold(request, start + 1 - len(first), first + told)

    def begin_alone(self, request: Request) -> list[Report]:
        """Give a request whose prompt is one token its row; it has nothing to read."""
        request.row = self._runner.cache.new_row(request.level)
        if request.submit.prompt_logprobs is None:
            return []
        return _untold(request, 0, self._unscored(request))

    def _unscored(self, request: Request) -> list[TokenLogprob]:
        """Return a prompt's first token, which nothing comes before."""
        return [self._text.told(request.prompt[0], None)]

    def found(self, request: Request, read: int) -> Hit:
        """Return the deepest checkpoint within the first ``read`` tokens of a request's prompt."""
        if self.tree is None:
            return Hit(0)
        return self.tree.found(request.prompt[: read + 1], request.salt)

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
        return PrefixUse() if self.remembered is None else self.remembered.use


def _untold(request: Request, index: int, logprobs: list[TokenLogprob]) -> list[Report]:
    """Return the report of these logprobs, without those that were sent before."""
    told = max(request.submit.prompt_reported, request.prompt_reported)
    skipped = max(0, told - index)
    if skipped >= len(logprobs):
        return []
    request.prompt_reported = index + len(logprobs)
    return [RowPrompt(rid=request.rid, index=index + skipped, logprobs=logprobs[skipped:])]
