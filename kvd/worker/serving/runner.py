"""Forward passes of one model over its cache, on the calling thread: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts.checks import Checks
from kvd.worker.attention.fused import short_splits
from kvd.worker.cache import padded_sizes
from kvd.worker.cache.layout import Access
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache, Stages, Start, settle_pass
from kvd.worker.cache.step_down import ModelStepDown, PoolTrimming
from kvd.worker.device import on_cpu
from kvd.worker.serving import fast_paths
from kvd.worker.serving.compiled import CompiledDecode, obstacle
from kvd.worker.serving.rounding import MOST_TOKENS, agree, batch_floor, token_floor
from kvd.worker.serving.split_head import SplitHead
from kvd.worker.serving.step_inputs import StepInputs
from protocol import memory_bounds
from protocol.memory_bounds import SCORED_AT_ONCE
from protocol.types import FastPath, FastPathName

_CHECKED = (3, 200)
"""Tokens of the rows that compiled steps are checked on: one has only a tail, one has pages."""
_CHECKED_STEPS = 2
STAGE_ALONE = 1 / 8
"""Part of a pass that an accelerator computes while the host builds the next part, if no decode
steps run in between. It is fixed, so that all ranks of a gang launch their sums in the same order.
"""
_PACKED = (((3,), (192, 6), (64,), (20,), (9,)), ((20,), (9,), (70,), (1,), (64,)))
"""Tokens of the chunks of five rows that packed passes are checked on, in two passes.

In the first one, CUDA attends four rows together (`kvd.worker.attention.packed`). In the second
one, row 1 has two pages, which two splits can share (`kvd.worker.attention.fused.short_splits`).
"""

COMPILED: FastPathName = "compiled steps"
PACKED: FastPathName = "packed prefill"
_used = attrgetter("used")
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""What a model's Python code raises for arguments that it does not support."""

Row = Any
"""A sequence of the runner's cache: `SequenceRow` or `OwnRow`."""


class Runner:
    """A model and its cache."""

    draws_late = True
    """Whether a decode step may draw fewer rows than it was launched with."""

    def __init__(self, model: Any, cache: ModelCache | MlxLmCache, min_batch: int = 0) -> None:
        """``min_batch``: `batch_floor` of the model; 0: it is measured."""
        self.model = model
        self.cache: Any = cache
        self.paths: dict[FastPathName, FastPath] = {}
        """The choices of `compile` and `pack`."""
        self._compiled: CompiledDecode | None = None
        paged = isinstance(cache, ModelCache) and all(
            access is Access.PAGES for access in cache.access.values()
        )
        self._recurrent = isinstance(cache, ModelCache) and bool(cache.states.parts)
        # With `Access.RECTANGLES`, rounding depends on the other rows even with padding.
        padded = on_cpu() and paged and cache.batched
        self._min_batch = (min_batch or batch_floor(model)) if padded else 1
        """Smaller batches are padded to this many rows, so that all round alike."""
        self._head: SplitHead | None = None
        """Computes logits in parts; None: the logits of a chunk are computed at once."""
        self.interleaves = False
        """Whether decode steps can run between the stages of a prefill pass (`interleave`)."""
        self.packs = False
        """Whether a pass can prefill several chunks, of one or more rows."""
        self.ranks = 1
        """Processes that compute each pass together."""
        self._min_tokens = 1
        """Minimum tokens in a packed prefill pass. Smaller passes are padded, so that rounding does
        not depend on the other chunks."""

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    @property
    def floors(self) -> tuple[int, int]:
        """Rows of the smallest decode batch, and tokens of the smallest packed pass."""
        return self._min_batch, self._min_tokens

    @property
    def launches(self) -> int:
        """Attention kernels that steps have launched so far, as far as can be known."""
        backend = self.cache.backend if isinstance(self.cache, ModelCache) else None
        return 0 if backend is None else backend.launched()

    def compile(self, checks: Checks | None = None) -> bool:
        """Compile decode steps if their results agree with plain steps; return whether they do.

        The cache must be empty, and is empty again afterwards.
        """
        if why := obstacle(self.cache):
            return self._choose(fast_paths.declined(COMPILED, "model", why))
        choice = (checks or Checks()).result(COMPILED, self._check_compiled, FastPath, passed=_used)
        self._compiled = CompiledDecode(self.model, self.cache) if choice.used else None
        return self._choose(choice)

    def _agree(self, logits: mx.array, expected: mx.array, *, exactly: bool = False) -> bool:
        return agree(logits, expected, layers=len(self.model.layers), exactly=exactly)

    def _check_compiled(self) -> FastPath:
        cache, choice = self.cache, fast_paths.used(COMPILED)
        pairs = [[cache.new_row() for _ in _CHECKED] for _ in range(2)]
        for pair in pairs:
            for row, length in zip(pair, _CHECKED, strict=True):
                self.prefill(row, _some_tokens(length))
        tokens = mx.array([1] * len(_CHECKED), mx.int32)
        plain = [self.decode(pairs[0], tokens) for _ in range(_CHECKED_STEPS)]
        mx.eval(plain, cache.arrays())
        self._compiled = CompiledDecode(self.model, cache)
        try:
            fused = [self.decode(pairs[1], tokens) for _ in range(_CHECKED_STEPS)]
            mx.eval(fused, cache.arrays())
            if not all(map(self._agree, plain, fused)):
                choice = fast_paths.declined(COMPILED, "results", "they differ from plain steps")
        except _REFUSALS as error:  # the model's Python code cannot be traced
            choice = fast_paths.failed(COMPILED, error)
        for row in chain(*pairs):
            cache.free(row)
        cache.shrink()
        return choice

    def _choose(self, choice: FastPath) -> bool:
        """Note whether a fast path is used, and return it."""
        self.paths[choice.name] = choice
        return choice.used

    def pack(self, checks: Checks | None = None) -> bool:
        """Allow several chunks in `prefill_pass` if they agree with chunks alone; return whether.

        On the CPU they must agree to the bit, elsewhere except for rounding. The cache must be
        empty, and is empty again afterwards.
        """
        checks = checks or Checks()
        choice = self._may_pack(checks)
        if choice.used:
            choice = checks.result(PACKED, self._check_packed, FastPath, passed=_used)
        self.packs = self._choose(choice)
        if not self.packs:
            self._min_tokens = 1
        return self.packs

    def _check_packed(self) -> FastPath:
        cache, choice = self.cache, fast_paths.used(PACKED)
        plain, *alone = (cache.new_row() for _ in range(1 + len(_PACKED[0])))
        packed = [cache.new_row() for _ in _PACKED[0]]
        tokens = mx.array([1] * len(packed), mx.int32)
        try:
            for counts in _PACKED:
                chunks = [[_some_tokens(count) for count in one] for one in counts]
                self.packs = False
                self.prefill(plain, chunks[0][0])
                self.packs = True
                for row, some in zip(alone, chunks, strict=True):
                    for chunk in some:
                        self.prefill(row, chunk)
                rows = [row for row, some in zip(packed, chunks, strict=True) for _ in some]
                with short_splits(cache.stores):
                    self.prefill_pass(rows, [chunk for some in chunks for chunk in some])
            found = [self.decode(rows, tokens) for rows in (alone, packed)]
            right = self.decode([plain], tokens[:1])
            mx.eval(found, right, cache.arrays())
            if not self._agree(*found, exactly=on_cpu()):
                why = "chunks differ from chunks that are prefilled alone"
                choice = fast_paths.declined(PACKED, "results", why)
            elif not self._agree(right, found[1][:1]):
                why = "tokens differ from tokens that are prefilled in sequence"
                choice = fast_paths.declined(PACKED, "results", why)
        except _REFUSALS as error:  # the model needs a row's tokens in sequence
            choice = fast_paths.failed(PACKED, error)
        cache.end_pass()
        for row in (plain, *alone, *packed):
            cache.free(row)
        cache.shrink()
        return choice

    def _may_pack(self, checks: Checks) -> FastPath:
        """Set the fewest tokens of a packed pass, unless the cache or the model allows none."""
        if why := obstacle(self.cache):
            return fast_paths.declined(PACKED, "model", why)
        # 0 stands for no floor, because only passed checks are kept.
        floor = partial(token_floor, self.model) if on_cpu() else (lambda: 1)
        min_tokens = checks.result("token floor", lambda: floor() or 0, int, passed=bool)
        if not min_tokens:
            why = f"padding to {MOST_TOKENS} tokens does not make all products round alike"
            return fast_paths.declined(PACKED, "results", why)
        self._min_tokens = min_tokens
        return fast_paths.used(PACKED)

    def pass_tokens(self, chunk: int, *, alone: bool = True) -> int:
        """Return the most prompt tokens of one row in a pass, with chunks of ``chunk`` tokens.

        ``alone``: True if no rows decode. Passes of several ranks have more tokens then. Otherwise
        they would delay the rows.
        """
        if not self.packs:
            return chunk
        # A row reserves its window, and the pages of a dense start, for a whole pass.
        reserves = any(one.kind.bounded or one.quantized_start for one in self.cache.stores)
        wide = alone and self.ranks > 1 and not reserves
        cuda = padded_sizes.attention_is_planned()
        return memory_bounds.pass_tokens(chunk, cuda=cuda, wide=wide)

    def prefill(self, row: Row, tokens: list[int]) -> None:
        """Prefill a chunk of a prompt, without logits; evaluated and flushed on return."""
        self.prefill_pass([row], [tokens])

    def interleave(self, checks: Checks | None = None) -> bool:
        """Allow decode steps between the stages of a pass if they change no result.

        The model's code is called again before its call for the pass has returned, so it may keep
        nothing in between. On the CPU results must be equal to the bit, elsewhere except for
        rounding. Returns whether they are. The cache must be empty, and is empty again afterwards.
        """
        if not (isinstance(self.cache, ModelCache) and self.cache.can_pack):
            return False
        agree = (checks or Checks()).agrees("stages", self._stages_agree)
        self.interleaves = agree
        return agree

    def _stages_agree(self) -> bool:
        cache, token = self.cache, mx.array([1], mx.int32)
        plain, staged, *others = rows = [cache.new_row() for _ in range(4)]
        found: list[mx.array] = []
        chunk = _some_tokens(_PACKED[0][1][0])

        def decode(row: Row) -> mx.array:
            logits = self.decode([row], token)
            mx.eval(logits, cache.arrays())
            return logits

        def run_stage(_: int, start: Start) -> None:
            # On accelerators a step may come before the start of the stage that is built.
            is_first = len(found) % 2 > 0 and not on_cpu()
            if not is_first:
                start()
            found.append(decode(others[0]))
            if is_first:
                start()

        try:
            for row in others:
                self.prefill(row, _some_tokens(_CHECKED[0]))
            self.prefill(plain, chunk)
            self.prefill_pass([staged], [chunk], Stages(0.5, run_stage, lambda: None))
            expected = [decode(others[1]) for _ in found]
            pairs = zip([*expected, decode(plain)], [*found, decode(staged)], strict=True)
            agree = all(self._agree(one, other, exactly=on_cpu()) for one, other in pairs)
        except _REFUSALS:
            agree = False
        cache.end_pass()
        for row in rows:
            cache.free(row)
        cache.shrink()
        return agree

    def prefill_pass(
        self,
        rows: list[Row],
        chunks: list[list[int]],
        stages: Stages | None = None,
        *,
        later: int = 0,
        meanwhile: Callable[[], None] | None = None,
        waits: bool = True,
    ) -> None:
        """Prefill chunks in one forward pass; several only if `packs`.

        Successive chunks may be of the same row. On the CPU, the results of a chunk are the same to
        the bit whatever other chunks its pass has.

        If `interleaves`, decode steps may run between ``stages`` of the pass (`ModelCache.stages`).
        Without these, an accelerator computes the pass in stages without decode steps.

        ``later``: see `ModelCache.begin_packed`. ``meanwhile`` is called once the rows have their
        new lengths; on CUDA, the device may still compute. ``waits``: see `finish_prefill` there.
        """
        for some in self._prefill_passes(rows):
            tokens = self._begin_prefill(rows[some], chunks[some], later)
            with self._divided(stages):
                self.model(tokens, cache=self.cache.views(rows))
            self.cache.end_pass()
            if stages is not None:
                settle_pass(self.cache, stages)
            self.cache.finish_prefill(waits=some.stop < len(rows))
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            if waits:
                self.cache.wait()

    def _divided(self, stages: Stages | None) -> AbstractContextManager[None]:
        divided: AbstractContextManager[None] = nullcontext()
        if stages is not None:
            divided = self.cache.stages(stages.share, stages.run)
        elif not on_cpu() and isinstance(self.cache, ModelCache) and self.cache.can_pack:
            divided = self.cache.stages(STAGE_ALONE, _start, starts_early=True)
        return divided

    def _prefill_passes(self, rows: list[Row]) -> list[slice]:
        """Return the chunks of each pass: one pass, unless a row's chunks need separate ones."""
        starts = [
            index
            for index, (before, row) in enumerate(pairwise(rows), 1)
            if row is before and not self.cache.can_chain(row)
        ]
        return [slice(*span) for span in pairwise([0, *starts, len(rows)])]

    def prefill_hidden(
        self, rows: list[Row], chunks: list[list[int]], stages: Stages | None = None
    ) -> list[mx.array]:
        """Prefill as `prefill_pass`; return each chunk's hidden states, ``[tokens, channels]``.

        Only if `splits_head`.
        """
        assert self._head is not None, "the head is not split"
        found: list[mx.array] = []
        for some in self._prefill_passes(rows):
            tokens = self._begin_prefill(rows[some], chunks[some])
            with self._divided(stages):
                hidden = self._head.hidden(tokens, cache=self.cache.views(rows)).flatten(0, 1)
            self.cache.end_pass()
            mx.eval(hidden)  # before the flush, as in `score_parts`
            if stages is not None:
                settle_pass(self.cache, stages)
            self.cache.finish_prefill()
            ends = [0, *accumulate(map(len, chunks[some]))]
            found += [hidden[start:end] for start, end in pairwise(ends)]
        return found

    def split_head(self, checks: Checks | None = None) -> bool:
        """Compute logits of `score_parts` part by part if they are right; return whether they are.

        On the CPU they must be equal to the bit, elsewhere except for rounding. The cache must be
        empty, and is empty again afterwards.
        """
        agree = (checks or Checks()).agrees("split head", self._split_head_agrees)
        self._head = SplitHead(self.model) if agree else None
        return agree

    def _split_head_agrees(self) -> bool:
        cache, tokens = self.cache, _some_tokens(SCORED_AT_ONCE + 9)
        rows = [cache.new_row() for _ in range(2)]
        whole = self.score(rows[0], tokens)
        self._head = SplitHead(self.model)
        try:
            parts = self.score(rows[1], tokens)
            agree = parts.shape == whole.shape and self._agree(parts, whole, exactly=on_cpu())
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            agree = False  # the model's class has another form
        cache.end_pass()
        for row in rows:
            cache.free(row)
        cache.shrink()
        return agree

    @property
    def splits_head(self) -> bool:
        return self._head is not None

    def score(self, row: Row, tokens: list[int]) -> mx.array:
        """Prefill one row, and return the chunk's logits, ``[tokens, vocab]``, lazily."""
        return mx.concatenate([*self.score_parts(row, tokens)])

    def score_parts(
        self, row: Row, tokens: list[int], stages: Stages | None = None
    ) -> Iterator[mx.array]:
        """Prefill one row, and return its logits in parts of `SCORED_AT_ONCE` tokens, lazily.

        The row is prefilled when this method returns. ``stages``: see `prefill_pass`.
        """
        padded = self._begin_prefill([row], [tokens])
        compute = self.model if self._head is None else self._head.hidden
        with self._divided(stages):
            found: mx.array = compute(padded, cache=self.cache.views([row])).flatten(0, 1)
        found = found[None, : len(tokens)]
        self.cache.end_pass()
        # Before the flush: lazy arrays refer to the pools, and writing such a pool copies it.
        mx.eval(found)
        if stages is not None:
            settle_pass(self.cache, stages)
        self.cache.finish_prefill()
        return self._parts(found)

    def _parts(self, found: mx.array) -> Iterator[mx.array]:
        """Yield the logits of a chunk, from hidden states if the head is split."""
        for start in range(0, found.shape[1], SCORED_AT_ONCE):
            part = found[:, start : start + SCORED_AT_ONCE]
            # Not kept in a variable, which would hold the logits until the next part is wanted.
            yield part[0] if self._head is None else self._logits_of(part, self._head)

    def _logits_of(self, hidden: mx.array, head: SplitHead) -> mx.array:
        """Return the logits of few hidden states, ``[1, tokens, channels]``; evaluated."""
        count = hidden.shape[1]
        # Padded, so that rounding does not depend on the part.
        logits = head.logits(mx.pad(hidden, [(0, 0), (0, SCORED_AT_ONCE - count), (0, 0)]))
        mx.eval(logits)  # repeats the evaluation if memory is short, unlike `item`
        return logits[0, :count]

    def _begin_prefill(self, rows: list[Row], chunks: list[list[int]], later: int = 0) -> mx.array:
        """Start a pass over chunks; return its tokens.

        They are ``[batch, 1]``, padding included, if `packs`, else ``[1, tokens]`` of one row.
        """
        if not self.packs:
            (row,), (chunk,) = rows, chunks
            self.cache.begin_prefill(row, len(chunk))
            return mx.array([chunk])
        counts = [len(chunk) for chunk in chunks]
        batch = max(sum(counts), self._min_tokens)
        self.cache.begin_packed(rows, counts, batch, later)
        padding = [0] * (batch - sum(counts))
        return mx.array([*chain(*chunks), *padding])[:, None]

    def launch(self, rows: list[Row], inputs: StepInputs) -> mx.array:
        """Run one token of each row as `decode` does."""
        return self.decode(rows, inputs.tokens())

    def share_tokens(self, tokens: mx.array) -> mx.array:
        """Return the drawn tokens as all processes of the model see them, ``[rows]``; lazy."""
        return tokens

    def step_down(self, rows: list[Row], level: int) -> ModelStepDown:
        """Return the work of moving rows to a lower precision level. Only for paged caches."""
        return ModelStepDown(self.cache, rows, level)

    def trim_pools(self) -> PoolTrimming:
        """Return the work of cutting all pools to the pages in use. Only for paged caches."""
        return PoolTrimming(self.cache)

    def decode(self, rows: list[Row], tokens: mx.array) -> mx.array:
        """Run one token of each row, ``[rows]`` int32; return logits ``[rows, vocab]``, lazy.

        Flush the cache first if its `needs_flush` is true. Evaluate the result together with the
        cache's `arrays`.
        """
        passes = self._passes(rows)
        if len(passes) == 1:
            return self._decode(rows, tokens, passes[0][1])
        found, order = [], []
        for places, floor in passes:
            some = [rows[place] for place in places]
            logits = self._decode(some, tokens[mx.array(places)], floor)
            # Launched one by one, so that the next pass can reuse this one's temporary memory.
            mx.async_eval(logits, self.cache.arrays())  # type: ignore[no-untyped-call]
            found.append(logits)
            order += places
        return mx.concatenate(found)[mx.array([order.index(place) for place in range(len(rows))])]

    def _passes(self, rows: list[Row]) -> list[tuple[list[int], int]]:
        """Return the rows of each pass, by index, and the fewest rows that its batch may have."""
        together = [place for place, row in enumerate(rows) if self._can_share(row)]
        passes = [([place], 1) for place in range(len(rows)) if place not in together]
        if together:
            groups = self.cache.rectangles.passes([rows[place] for place in together])
            passes += [([together[index] for index in group], self._min_batch) for group in groups]
        return passes

    def _can_share(self, row: Row) -> bool:
        """Return whether a row can share a pass: not while its recurrent state is incomplete."""
        return bool(self.cache.batched and (not self._recurrent or self.cache.states.complete(row)))

    def _decode(self, rows: list[Row], tokens: mx.array, floor: int) -> mx.array:
        count = len(rows)
        batch = max(count, floor)
        self.cache.begin_decode(rows, batch)
        if batch > count:
            tokens = mx.concatenate([tokens, mx.zeros((batch - count,), tokens.dtype)])
        if self._compiled is not None:
            logits = self._compiled(tokens)
        else:
            logits = self.model(tokens[:, None], cache=self.cache.views(rows))[:, -1]
        self.cache.end_pass()
        return logits[:count]


def _some_tokens(count: int) -> list[int]:
    return [1 + position % 64 for position in range(count)]


def _start(_: int, start: Start) -> None:
    """Start a stage of a pass without decode steps."""
    start()
