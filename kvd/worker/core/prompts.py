"""Reading prompts: chunks into rows, from where a prompt read before leaves off, and their scores.

The device is idle in all of it. A request whose prompt is to be scored reads all of it, since a
checkpoint has no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvd.worker.core.request import Request
from kvd.worker.prefix.cache import PrefixCache
from kvd.worker.sampling.logprobs import score
from kvd.worker.sampling.sampler import finite_and_varied
from kvd.worker.serving.runner import Runner
from kvd.worker.text.text import Text
from protocol.types import TokenLogprob
from protocol.worker import Report, RowPrompt


class Prompts:
    """The prompts of one engine, and the tree of those that it remembers, if it does."""

    def __init__(
        self,
        runner: Runner,
        prefix_cache: PrefixCache,
        text: Text,
        spare_bytes: Callable[[], int],
    ) -> None:
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._text = text
        self._spare_bytes = spare_bytes
        self.computed = 0
        """Tokens that were read."""

    def begin(self, request: Request) -> int:
        """Give a request its row; return how many of its tokens are in it already."""
        cache = self._runner.cache
        hit = self._prefix_cache.begin_prefill(request.tracked)
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
        self._prefix_cache.prefilled(request.tracked, end, request.row, self._spare_bytes)

    def _scored(self, request: Request, start: int, end: int, top: int) -> list[Report]:
        logits = self._runner.score(request.row, request.prompt[start:end])
        if not finite_and_varied(logits).all().item():
            request.distrusted = True
            return []
        following = request.prompt[start + 1 : end + 1]
        scores = score(logits, mx.array(following, mx.int32), top=top > 0)
        told = [
            self._text.token_logprob(one.token, one.logprob, one.top)
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
        return [self._text.token_logprob(request.prompt[0], None)]


def _untold(request: Request, index: int, logprobs: list[TokenLogprob]) -> list[Report]:
    """Return the report of these logprobs, without those that were sent before."""
    told = max(request.submit.prompt_reported, request.prompt_reported)
    skipped = max(0, told - index)
    if skipped >= len(logprobs):
        return []
    request.prompt_reported = index + len(logprobs)
    return [RowPrompt(rid=request.rid, index=index + skipped, logprobs=logprobs[skipped:])]
