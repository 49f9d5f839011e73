"""The requests of one engine, their rows, and the decode step in flight.

Only `Batch` and `PreemptedRows` assign the fields of `Request` and `Completion`. Their methods are
the events of a request's life::

    add       decode             preempt                  restore / move_in
    ---> queued ---> in batch ----------> snapshots ----------------------> in batch ---> released
                         ^                    | move_out
                         |                    v
                         +---- start_over --- on disk, or nothing is kept

Decode steps are pipelined: `decode` launches a step from the lazy tokens of the previous one, and
reads the previous one while the device computes. A completion that ends in step n therefore still
runs in step n+1. Its row is freed when step n+1 is read.

If a row has a grammar, its mask depends on the previous token. Threads compute the masks. The draw
follows the forward pass: before the previous step is read if the masks are ready by then, and after
it if not. A row whose mask takes too long is drawn by a later step (`kvd.worker.core.masks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from kvd.worker.cache.unplaced_rows import place
from kvd.worker.core.decode_step import DecodeStep, step_inputs
from kvd.worker.core.delivery import report_cached, report_rest, report_text
from kvd.worker.core.forced import forced_token, restart_sampling
from kvd.worker.core.masks import IDLE_SECONDS, Over, Relieve, StepMasks
from kvd.worker.core.progress import restore_progress
from kvd.worker.core.request import Completion, Request
from kvd.worker.core.row_copies import copies
from kvd.worker.core.swap import Transfers
from kvd.worker.engine import OnPhase
from kvd.worker.gang.leader import EngineRunner
from kvd.worker.prefix.cache import PrefixCache
from kvd.worker.prefix.queued_paths import Path
from kvd.worker.prefix.tree import Hit
from kvd.worker.sampling.row import RowSettings
from kvd.worker.sampling.sampler import SampledToken, Sampler
from kvd.worker.scheduling.admission import Admission
from kvd.worker.serving.runner import Row
from kvd.worker.text.text import Text
from protocol.errors import KvdError, NumericalError
from protocol.messages import FinishReason
from protocol.worker import Report, RowFailed


class Batch:
    """The requests of one engine. ``enter_phase`` is called before a flush and a decode step."""

    def __init__(
        self,
        runner: EngineRunner,
        admission: Admission,
        prefix_cache: PrefixCache,
        transfers: Transfers,
        text: Text,
        enter_phase: OnPhase,
        relieve: Relieve = lambda _: None,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.reports: list[Report] = []
        """Reports for the daemon since the end of the last step."""
        self.generated_tokens = 0
        self.max_rows = 0
        """Rows of the largest step so far."""
        self.step_began_at = 0.0
        """When the device could begin the newest step: at its launch, or after the one before."""
        self.decode_seconds = 0.0
        """Duration of the last `decode`."""
        self.admission = admission
        self.scheduler = admission.scheduler
        self.runner = runner
        self.cache: Any = runner.cache
        """`ModelCache` or `MlxLmCache`."""
        self.prefix_cache, self.transfers = prefix_cache, transfers
        self.text, self.enter_phase = text, enter_phase
        self.on_untrusted: Callable[[Path], None] = lambda _path: None
        """Called with the path of a prompt whose request returned bad logits."""
        self._sampler = Sampler(text.vocab_size, share=runner.share_tokens)
        self._masks = StepMasks(text.vocab_size, relieve, draws_late=runner.draws_late)
        self._step: DecodeStep | None = None
        self._last: list[tuple[Completion, SampledToken, int]] = []
        """Completions with their last tokens and levels, whose matchers a thread advances."""

    @property
    def in_flight(self) -> bool:
        return self._step is not None

    def holds(self, request: Request) -> bool:
        """Return whether a request has not ended. A later request may have the same id."""
        return self.requests.get(request.rid) is request

    # Requests are queued and admitted.

    def add(self, request: Request, deadline: float | None) -> bool:
        """Queue a request; return False if it is replayed and had already ended.

        ``deadline``: seconds on the engine's clock. Raises `KvdError` if it can never run.
        """
        reports: list[Report] = []
        replayed = zip(list(request.completions), request.submit.resume, strict=False)
        for completion, resumed in replayed:
            reports += restore_progress(request, completion, resumed, self.text)
        if request.submit.resume:
            request.resumed_at = request.longest
        request.submit = replace(request.submit, prompt=None, messages=None, tokens=None, resume=[])
        if request.completions:
            self.admission.submit(
                request.rid,
                len(request.prompt),
                request.max_new,
                priority=request.submit.priority,
                deadline=deadline,
                choices=len(request.completions),
                path=() if request.tracked.full_prefill else request.tracked.path,
                open_ended=request.submit.max_tokens is None,
                generated=request.longest,
            )
            self.requests[request.rid] = request
            self.prefix_cache.enqueue(request.tracked)
        self.reports += reports
        return bool(request.completions)

    def set_level(self, request: Request, level: int) -> None:
        request.level = level
        request.tracked.lowered = level > 0 or request.submit.embed is not None

    def step_down(self, request: Request, level: int) -> None:
        if request.begun or request.kept:
            request.mixed_levels = True
            if request.prompt_level is None:
                request.prompt_level = request.level
        self.set_level(request, max(request.level, level))

    # Prompts.

    def new_row(self, request: Request, hit: Hit, coming: int = 1) -> Row:
        """Return a row with the content of a checkpoint, or an empty one.

        ``coming``: see `KVStore.new_row`.
        """
        if hit.tokens:
            return self.cache.restore(hit.snapshot, coming)
        return self.cache.new_row(request.level, coming)

    def open_row(self, request: Request, hit: Hit | None = None) -> None:
        request.row = self.new_row(request, hit or Hit(0))

    def take_row(self, request: Request, row: Row, tokens: int) -> None:
        """Give a request a row that holds the first ``tokens`` of its prompt."""
        request.row = row
        if not request.started:
            request.started = True
            self.reports += report_cached(request, tokens, self.text)

    def place_row(self, request: Request) -> None:
        """Give the row of a prompt its slots, if it was read from segments and has none yet."""
        if request.row is not None and not request.row.is_placed:
            self.synchronize()
            place(self.cache, request.row)

    # Decode steps.

    def decode(self, rids: Sequence[str], *, timed: bool = True) -> bool:
        """Launch the next step of these requests, then read the previous one.

        Return whether the duration of this call measures a decode step. ``timed``: whether the
        duration of the next call will measure the step that is launched here.
        """
        start, previous, is_read, over = time.monotonic(), self._step, False, list[Over]()
        step = self._step = self._launch(rids)
        advances = step is not None and bool(step.drawing or step.passing)
        if step is not None:
            step.is_timed = timed and advances
        if step is not None and step.draw is None:
            if previous is not None and self._masks.can_read_previous(step):
                is_read = True
                self._read_step(previous)
            over = self._masks.draw(step, self._sampler, self.requests, idle=previous is None)
            mx.async_eval(step.arrays)  # type: ignore[no-untyped-call]
            self._step = step if step.drawing or step.passing else None
        if previous is not None and not is_read:
            self.enter_phase("decode")
            self._read_step(previous)
        for completion, error in over:
            self._end_by_grammar(completion, error)
        self._deliver_last(0.0 if self.in_flight else IDLE_SECONDS)
        end = time.monotonic()
        self.decode_seconds, self.step_began_at = end - start, start if previous is None else end
        return advances and previous is not None and previous.is_timed

    def _launch(self, rids: Sequence[str]) -> DecodeStep | None:
        """Launch the next step, with its draw unless a row has a grammar or is late; return it."""
        for rid in rids:
            if not self.requests[rid].begun:
                self._fork(self.requests[rid])
        live = self._live(rids)
        if not live:
            return DecodeStep([], [], None, [], []) if self._masks.late else None
        rows = [completion.row for completion in live]
        if self.cache.needs_flush(rows):
            self.enter_phase("flush")
            self.synchronize()
            self.cache.flush()
        self.enter_phase("decode")
        logits = self.runner.launch(rows, step_inputs(self._step, live))
        levels = {rid: self.requests[rid].level for rid in rids}
        step = DecodeStep.of(logits, live, rows, levels)
        for completion in live:
            completion.launched += 1
            self.scheduler.note_generated(completion.key[0], completion.launched)
        if not (step.has_grammars or self._masks.late):
            step.draw_tokens(self._sampler)
        self._masks.evaluate(self._step, step, self.cache)
        self.cache.snapshots.evaluate()
        self.max_rows = max(self.max_rows, len(rows))
        return step

    def read_before_flush(self, rids: list[str], deliver: Callable[[], None]) -> list[str]:
        """Deliver the step in flight if the next step of these requests must write pages first.

        A flush waits for the step anyway. Return the requests that have not ended.
        """
        if self._step is None or not self.must_flush(rids):
            return rids
        self.finish_step()
        deliver()
        return [rid for rid in rids if rid in self.requests]

    def must_flush(self, rids: Sequence[str]) -> bool:
        """Return whether the next decode step of these requests must write pages first."""
        live = self._live(rid for rid in rids if rid in self.requests)
        rows = [completion.row for completion in live if completion.row is not None]
        return bool(self.cache.needs_flush(rows))

    def _live(self, rids: Iterable[str]) -> list[Completion]:
        """Return the completions of these requests that take part in the next decode step."""
        requests = [self.requests[rid] for rid in rids]
        live = [
            one for request in requests for one in request.live if one.launched < request.max_new
        ]
        return self._masks.without_late(live)

    def _fork(self, request: Request) -> None:
        """Turn the row with the prompt into one row for each completion."""
        request.begun = True
        self.place_row(request)
        row, request.row = request.row, None
        first, *others = request.completions
        if others:
            self.synchronize()
            for completion, other in zip(others, copies(self.cache, row, len(others)), strict=True):
                self.join(request, completion, other)
        self.join(request, first, row)

    def synchronize(self) -> None:
        """Wait for the step in flight without reading it."""
        if self._step is not None:
            mx.eval(self._step.arrays, self.cache.arrays())

    def finish_step(self, *, late: bool = False) -> None:
        """Wait for the step in flight and read it; completions may end.

        ``late``: go on until each token that was launched is read.
        """
        step, self._step = self._step, None
        if step is not None:
            mx.eval(step.arrays, self.cache.arrays())
            self._read_step(step)
        self._deliver_last(IDLE_SECONDS)  # a prompt may follow, which takes longer
        while late and (awaited := self._awaited_completions()):
            self._masks.wait(awaited)
            self.decode(())  # draws late rows
            self.finish_step()

    def _awaited_completions(self) -> list[Completion]:
        """Return the completions with a launched token that is not delivered yet."""
        late = [row.completion for row in self._masks.late]
        return late + [completion for completion, _, _ in self._last]

    def discard_step(self) -> None:
        """Drop the step in flight after a failure, and release completions that have ended."""
        self._step, self._last = None, []
        requests = list(self.requests.values())
        live = [one for request in requests for one in request.live]
        self._masks.discard(live)
        for completion in live:
            completion.forget_draw()
        for request in requests:
            for completion in [one for one in request.completions if one.ended]:
                self._release(request, completion)

    def _read_step(self, step: DecodeStep) -> None:
        self._masks.advance(step)
        for completion in step.passing:
            if completion.ended and not completion.released:
                self._end(self.requests[completion.key[0]], completion)
        drawn_tokens = [] if step.draw is None else step.draw.read()
        for completion, drawn in zip(step.drawing, drawn_tokens, strict=True):
            if completion.released:  # its request failed in this loop
                continue
            completion.trusted = drawn.trusted
            request = self.requests[completion.key[0]]
            if completion.ended:
                self._end(request, completion)
            elif drawn.trusted:
                if not request.tracked.trusted:
                    request.tracked.trusted = True
                    self.prefix_cache.trust(request.tracked)
                level = step.levels[step.positions[completion.key]]
                if completion.dropped:
                    completion.dropped = False
                elif completion.is_lent and len(completion.tokens) + 1 == request.max_new:
                    self._last.append((completion, drawn, level))
                else:
                    self._deliver(request, completion, drawn, level)
            else:
                self.fail_untrusted(request)

    def _deliver_last(self, seconds: float) -> None:
        """Deliver the last tokens of completions whose matchers have advanced.

        Only then it is known whether they end by their grammar. ``seconds``: the longest wait.
        """
        last, self._last = [one for one in self._last if not one[0].ended], []
        if last:
            self._masks.wait([completion for completion, _, _ in last], seconds)
        for completion, drawn, level in last:
            if completion.is_lent:
                self._last.append((completion, drawn, level))
            elif not completion.ended:
                self._deliver(self.requests[completion.key[0]], completion, drawn, level)

    def _deliver(
        self, request: Request, completion: Completion, drawn: SampledToken, level: int
    ) -> None:
        """Append a token, and those that the stream forces after it; report them."""
        stream = completion.stream
        text = stream.push(drawn.token)
        tokens = [] if stream.ended else [drawn.token]
        index = len(completion.tokens)
        completion.tokens.append(drawn.token)
        if completion.matcher is not None:
            completion.matcher.push(drawn.token)
        self.generated_tokens += 1
        request.choices.record_level(level, request.prompt_level)
        over = stream.stopped or len(completion.tokens) == request.max_new
        if over and not stream.stopped:
            while completion.is_lent:  # only if forced tokens fill the answer
                self._masks.wait([completion])
            text += stream.finish(ended=completion.complete)
        logprobs = None
        if (scored := drawn.scored) is not None:
            logprobs = [
                self.text.token_logprob(token, scored.logprob, scored.top) for token in tokens
            ]
        self.reports += report_text(request, completion, index, tokens, text, logprobs)
        if over:
            self._finish(request, completion, completion.reason)
        elif stream.forced:
            # The first one replaces the token that the step in flight draws.
            completion.dropped |= completion.launched > len(completion.tokens)
            self._deliver(request, completion, forced_token(request, stream.forced[0]), level)
            completion.known = len(completion.tokens)
            restart_sampling(self._sampler, request, completion)

    # Requests end.

    def finish(self, rid: str, reason: FinishReason) -> None:
        """End a request now; the step in flight may still hold its rows."""
        request = self.requests.get(rid)
        if request is not None:
            for completion in request.live:
                self._finish(request, completion, reason)

    def _finish(self, request: Request, completion: Completion, reason: FinishReason) -> None:
        request.choices.reasoning_tokens += completion.stream.reasoning_tokens
        request.choices.stop_text = completion.stream.stop_text
        self.reports += request.choices.finish(completion.key[1], reason, len(completion.tokens))
        self._end(request, completion)

    def fail(self, request: Request, error: KvdError) -> None:
        self.reports.append(RowFailed(rid=request.rid, error=error.info()))
        for completion in request.live:
            self._end(request, completion)

    def fail_untrusted(self, request: Request) -> None:
        """Fail a request with bad logits, and drop the checkpoints and segments on its path."""
        self.prefix_cache.drop_untrusted(request.tracked)
        self.on_untrusted(request.tracked.path)
        error = NumericalError("the model's logits for this request are constant or not finite")
        self.fail(request, error)

    def _end_by_grammar(self, completion: Completion, error: KvdError | None) -> None:
        """End a completion whose grammar allows no further token; ``error``: why it fails."""
        request = self.requests[completion.key[0]]
        matcher = completion.matcher
        if completion.ended or completion.dropped or matcher is None:
            return
        if error is not None and matcher.optional:
            completion.drop_grammar(f"calls are no longer kept valid: {error.message}")
            return
        if error is not None:
            self.fail(request, error)
            return
        self.reports += report_rest(request, completion, ended=True)
        self._finish(request, completion, "stop")

    def _end(self, request: Request, completion: Completion) -> None:
        completion.ended = True
        if self._step is None or not self._step.includes(completion):
            self._release(request, completion)

    def _release(self, request: Request, completion: Completion) -> None:
        """Free a completion's row; with the last one, forget the request."""
        if decoding := completion.row is not None:
            self.leave(completion)
        if completion.snapshot is not None:
            self.cache.snapshots.drop(completion.snapshot)
        completion.released = True
        self._masks.forget(completion)
        request.completions.remove(completion)
        if request.completions:
            if decoding:
                self.admission.finish_choice(request.rid)
            return
        if request.row is not None:
            self.cache.free(request.row, clean=False)  # its logits were never checked
        if request.snapshot is not None:
            self.cache.snapshots.drop(request.snapshot)
        self.prefix_cache.remove(request.tracked)
        self.transfers.discard(request.rid, request.swapped)
        self.admission.finish(request.rid)
        del self.requests[request.rid]

    # Rows join and leave the batch.

    def join(self, request: Request, owner: Request | Completion, row: Row) -> None:
        """Give a row to a completion, which then decodes, or to a request in prefill."""
        owner.row = row
        if isinstance(owner, Completion):
            settings = RowSettings.of(request.submit, owner.stream.ends, owner.key[1])
            self._sampler.add(owner.key, settings, request.prompt, owner.tokens)

    def leave(self, completion: Completion) -> None:
        """Free the row of a completion that decodes."""
        self._sampler.remove(completion.key)
        self.cache.free(completion.row, clean=completion.trusted)
        completion.row = None

    # Rows are computed again.

    def start_over(self, request: Request) -> None:
        """Record that a request has no rows: prefill its prompt again, then feed its tokens."""
        request.begun = False
        request.tracked.trusted = False  # its new checkpoints were not checked
        for completion in request.completions:
            completion.launched = 0
            completion.known = len(completion.tokens)
        self.scheduler.restart_prefill(request.rid)

    def discard_rows(self, *, late: bool) -> None:
        """Forget all rows, which the caller frees; if ``late``, drop the snapshots too.

        ``late``: see `Recovery.discard`.
        """
        for request in self.requests.values():
            for completion in request.completions:
                if completion.row is not None:
                    completion.launched = len(completion.tokens)
            for owner in request.owners:
                owner.row = None
            for owner in request.preempted_owners if late else ():
                self.cache.snapshots.drop(owner.snapshot)
                owner.snapshot = None
                if isinstance(owner, Completion):
                    owner.launched = len(owner.tokens)
        self._sampler = Sampler(self.text.vocab_size, share=self.runner.share_tokens)

    def put_back(
        self, request: Request, completions: Sequence[Completion], rows: Sequence[Row]
    ) -> None:
        """Give rebuilt rows to these completions, or to the unfinished prompt if there are none.

        A request that is not admitted gets snapshots of the rows instead.
        """
        owners: Sequence[Request | Completion] = completions or [request]
        for owner, row in zip(owners, rows, strict=True):
            if self.scheduler.is_admitted(request.rid):
                self.join(request, owner, row)
            else:
                owner.snapshot = self.cache.snapshots.take(row)
                self.cache.free(row)
