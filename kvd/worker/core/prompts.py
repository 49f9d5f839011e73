"""Prefills prompts in chunks, from the deepest checkpoint on, and scores them on request.

A prompt whose logprobs are requested is prefilled completely, since a checkpoint holds no logits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from kvd.worker.cache.model_cache import Stages
from kvd.worker.core.batch import Batch
from kvd.worker.core.delivery import report_prompt
from kvd.worker.core.embeddings import Embeddings
from kvd.worker.core.gathering import Gathering
from kvd.worker.core.interleaving import Interleaving
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.rates import Rates
from kvd.worker.core.request import Request
from kvd.worker.core.segment_reads import SegmentReads
from kvd.worker.device import on_cpu
from kvd.worker.prefix.cache import next_chunks
from kvd.worker.process.freed_buffers import FreedBuffers
from kvd.worker.sampling.logprobs import score
from kvd.worker.sampling.valid_logits import finite_and_varied
from kvd.worker.scheduling.scheduler import Chunk, Plan
from protocol.types import TokenLogprob


class Prompts:
    """The prompts of one engine."""

    def __init__(
        self,
        batch: Batch,
        memory: MemoryAccount,
        rates: Rates,
        embeddings: Embeddings,
        interleaving: Interleaving,
        freed_buffers: FreedBuffers,
    ) -> None:
        self._batch = batch
        self._freed_buffers = freed_buffers
        self.gathering = Gathering(time.monotonic)
        self._runner = batch.runner
        self._prefix_cache = batch.prefix_cache
        self._memory = memory
        self.segments: SegmentReads | None = None
        """Reads prompts from the prefix store, if there is one."""
        self._rates = rates
        self._embeddings = embeddings
        self._interleaving = interleaving
        self.computed_tokens = 0

    def prepare(self, plan: Plan, *, tokenizing: bool) -> tuple[Chunk, ...]:
        """Return the chunks of a plan to prefill in this step: none while prompts wait for others.

        Also prefetch the segments of the queue's head, set the limit of freed buffers, and leave
        checkpoints that lacked memory before; the next pass forgets their tails.

        ``tokenizing``: whether a thread tokenizes a request.
        """
        budget = self._batch.admission.budget
        asks = plan.missing_pages > 0 and plan.growing is None and budget.open_bytes is not None
        waits = self.gathering.waits(
            new=bool(plan.group) and not self._batch.scheduler.has_begun_prompts,
            coming=tokenizing or asks,
            decode_s=self._rates.seconds("decode", 1) if plan.decode else 0.0,
        )
        chunks = () if waits else plan.group
        self._prefix_cache.retry(self._memory.spare_bytes, last=bool(chunks))
        self._freed_buffers.prepare(prefills=bool(chunks))
        self._prefetch_head()
        return chunks

    def _prefetch_head(self) -> None:
        """Prefetch the segments of the head of the queue, unless it is admitted again."""
        head = self._batch.scheduler.head
        if self.segments is None or head is None or head.was_admitted or head.level:
            return
        self.segments.prefetch(self._batch.requests[head.rid])

    def prefill_next(self, decoding: Sequence[str]) -> None:
        """Prefill the next chunks. The requests of ``decoding`` decode between the stages."""
        self._interleaving.begin(decoding)
        scheduler = self._batch.scheduler
        chunks = next_chunks(scheduler, self._has_new_hit, self._begin)
        if not chunks:
            return  # all requests in prefill wait until their rows are read from disk
        start = time.monotonic()
        self._prefill(chunks)
        seconds = self._interleaving.end(time.monotonic() - start)
        self._rates.note("prefill", sum(chunk.length for chunk in chunks), seconds)
        for chunk in chunks:
            if chunk.rid in self._batch.requests:
                scheduler.mark_prefilled(chunk.rid, chunk.end)

    def _has_new_hit(self, rid: str) -> bool:
        return self._prefix_cache.has_new_hit(self._batch.requests[rid].tracked)

    def _begin(self, rid: str, coming: int) -> int:
        """Give a request its row; return the number of prompt tokens that the row holds.

        ``coming``: see `KVStore.new_row`.
        """
        request = self._batch.requests[rid]
        hit = self._prefix_cache.begin_prefill(request.tracked)
        if self.segments is not None and (tokens := self.segments.restore(request, hit)):
            return tokens
        if hit.tokens:
            self._batch.synchronize()  # the row gets tails and pages
        self._batch.take_row(request, self._batch.new_row(request, hit, coming), hit.tokens)
        return hit.tokens

    def begin_single_tokens(self, rids: Sequence[str]) -> None:
        """Give rows to decoding requests whose prompt is one token: they need no prefill."""
        for request in (self._batch.requests[rid] for rid in rids):
            if not request.begun and request.row is None:
                self._batch.open_row(request)
                if request.submit.prompt_logprobs is not None:
                    self._batch.reports += report_prompt(request, 0, self._first_token(request))

    def _stages(self, tokens: int) -> Stages | None:
        """Return how a pass over so many tokens is divided; None: rows do not decode in it."""
        one = self._interleaving
        if self._runner.interleaves and (on_cpu() or one.has_rows):
            return Stages(one.stage_share(tokens), one.run_stage, one.settle)
        one.settle()
        return None

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run the chunks, those without logprobs in one pass, and leave checkpoints."""
        requests = [self._batch.requests[chunk.rid] for chunk in chunks]
        for request in requests:
            if request.row is None:  # the request lost its row before a chunk ran
                self._batch.open_row(request)
            self._batch.place_row(request)
        plain = [
            (request, chunk)
            for request, chunk in zip(requests, chunks, strict=True)
            if request.submit.prompt_logprobs is None
        ]
        if plain:
            rows = [request.row for request, _ in plain]
            tokens = [request.prompt[chunk.start : chunk.end].tolist() for request, chunk in plain]
            stages = self._stages(sum(map(len, tokens)))
            if any(request.submit.embed is not None for request, _ in plain):
                self._embeddings.pool(plain, self._runner.prefill_hidden(rows, tokens, stages))
                self._finish(plain)
            else:
                self._runner.prefill_pass(
                    rows,
                    tokens,
                    stages,
                    later=self._later_tokens(chunks),
                    meanwhile=partial(self._finish_pass, plain),
                )
        pairs = zip(requests, chunks, strict=True)
        if scored := [pair for pair in pairs if pair not in plain]:
            # A pass over a chunk with logprobs forgets the tails that the one before has kept.
            self._prefix_cache.retry(self._memory.spare_bytes, last=True)
            self._finish(scored)

    def _later_tokens(self, chunks: Sequence[Chunk]) -> int:
        """Return how many tokens the prompts that have begun still need after this pass.

        Only if all chunks are on one precision level, those on that level count.
        """
        scheduler = self._batch.scheduler
        levels = {scheduler.find(chunk.rid).level for chunk in chunks}
        left = sum(
            one.prefill_end - one.prefilled
            for one in scheduler.states.prefilling.values()
            if one.prompt_started and not one.suspended and {one.level} == levels
        )
        return max(0, left - sum(chunk.length for chunk in chunks))

    def _finish_pass(self, pairs: Sequence[tuple[Request, Chunk]]) -> None:
        if self._runner.interleaves:
            self._interleaving.pass_written()
        self._finish(pairs)

    def _finish(self, pairs: Sequence[tuple[Request, Chunk]]) -> None:
        """Count chunks, and leave checkpoints of their prompts."""
        for request, chunk in pairs:
            self._count(request, chunk)
        starts = {request: chunk.start for request, chunk in reversed(pairs)}
        for request, end in {request: chunk.end for request, chunk in pairs}.items():
            if self._batch.holds(request):
                self._prefix_cache.prefilled(
                    request.tracked, starts[request], end, request.row, self._memory.spare_bytes
                )

    def _count(self, request: Request, chunk: Chunk) -> None:
        """Count a chunk that is prefilled. Prefills it first if its logprobs are requested."""
        top = request.submit.prompt_logprobs
        if not self._batch.holds(request):
            if request.submit.embed is None:
                return  # an earlier chunk's logits were bad
        elif top is not None and not self._score(request, chunk, top):
            return
        self.computed_tokens += chunk.length

    def _score(self, request: Request, chunk: Chunk, top: int) -> bool:
        """Prefill a chunk and report its logprobs; fail the request if its logits are bad."""
        own = request.prompt[chunk.start : chunk.end].tolist()
        # Decode steps run before the pass, in it, and between the parts of its logits.
        pauses = self._runner.interleaves and self._runner.splits_head
        if pauses:
            self._interleaving.run_step(1)
            parts = self._runner.score_parts(request.row, own, self._stages(len(own)))
        else:  # the logits of a whole chunk leave no memory for a step
            self._interleaving.settle()
            parts = self._runner.score_parts(request.row, own)
        logprobs: list[TokenLogprob] = []
        for part in parts:
            if not finite_and_varied(part).all().item():
                self._interleaving.settle()
                self._batch.fail_untrusted(request)
                return False
            start = chunk.start + len(logprobs) + 1
            tokens = request.prompt[start : start + len(part)].tolist()
            scores = score(part, mx.array(tokens, mx.int32), top=top > 0)
            logprobs += [
                self._batch.text.token_logprob(scored.token, scored.logprob, scored.top)
                for scored in scores.read([top] * len(tokens))
            ]
            del part, scores  # the logits
            if pauses:
                self._interleaving.run_step(chunk.length - len(logprobs))
                if not self._batch.holds(request):
                    return False
        first = self._first_token(request) if chunk.start == 0 else []
        self._batch.reports += report_prompt(
            request, chunk.start + 1 - len(first), first + logprobs
        )
        return True

    def _first_token(self, request: Request) -> list[TokenLogprob]:
        """Return a prompt's first token, which has no logprob."""
        return [self._batch.text.token_logprob(request.prompt[0], None)]
