"""The self-check: whether a runner gives the model's own logits on this machine.

It answers two questions, each with its own reference on the model's own shapes:

* Does the model work with kvd's caches at all? Rows of unequal length with dense pages are
  compared with mlx-lm's own caches, one sequence at a time.
* Is attention over quantized pages right on this device? The same steps run over kvd's pages and
  over dequantized copies of them (`kvd.worker.serving.reference`).

Nothing is trusted unchecked: on one backend, MLX returned wrong numbers from quantized products
while all other backends were right.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.mlx_lm_cache import state_arrays
from kvd.worker.serving.reference import dense_caches
from kvd.worker.serving.runner import Row, Runner

LENGTHS = (2, 126, 200)
"""Prompt lengths. The second row commits its first page during the steps; the third starts with
pages."""
SHORT_LENGTHS = (2, 128)
"""Prompt lengths that suffice to check a packing: one row has a page, the other has none."""
LONGEST_WINDOW = 512
"""Longest window that a row of the check exceeds: rows beyond it would take too long."""
CHUNK = 128
STEPS = 3

_OPAQUE = re.compile(r"\b(?:Prefill|Decode)Handle\b")
_MEANINGS = {
    r"only length-1 arrays|^arange\(\): incompatible": (
        "the model takes the position as one number for all rows"
    ),
    r"asks for a mask array": "the model masks its scores itself (it asks for a mask array)",
    r"cannot be broadcast": "the model's own arrays do not fit this batch",
}
"""Causes of failures, by a pattern of the error's text."""


class SelfCheckFailed(Exception):
    """The model cannot be served this way; the text says why."""


class Reference(Protocol):
    """Source of one row's right logits, step by step."""

    def before(self) -> None:
        """Record what `caches` needs of the row's state before the runner's step."""

    def caches(self) -> list[Any]:
        """Return caches for the model's own run of the same step."""


MakeReference = Callable[[Runner, Row, list[int]], Reference]
"""Creates the reference of a row from its prompt, which has been prefilled."""


class _Own:
    """mlx-lm's own caches, updated with every step."""

    def __init__(self, runner: Runner, _row: Row, prompt: list[int]) -> None:
        self._caches: list[Any] = make_prompt_cache(runner.model)
        runner.model(mx.array([prompt]), cache=self._caches)
        # Not the logits: those of 584 tokens and 262,208 words would take 612 MB.
        mx.eval(list(state_arrays(self._caches)))

    def before(self) -> None:
        pass

    def caches(self) -> list[Any]:
        return self._caches


class _Held:
    """Dense copies of the row's pages and tail."""

    def __init__(self, runner: Runner, row: Row, _prompt: list[int]) -> None:
        self._cache = runner.cache
        self._row = row

    def before(self) -> None:
        self._states = self._cache.states.state_of(self._row)

    def caches(self) -> list[Any]:
        return dense_caches(self._cache, self._row, self._states, without_newest=1)


def tolerance(dtype: mx.Dtype) -> float:
    """Return the relative error of logits that counts as rounding."""
    return 1e-3 if dtype == mx.float32 else 5e-2


def lengths_for(kinds: Sequence[Kind]) -> tuple[int, ...]:
    """Return prompt lengths; the longest exceeds every window up to `LONGEST_WINDOW`."""
    bounds = [kind.window or kind.chunk or 0 for kind in kinds]
    passed = max((bound for bound in bounds if bound <= LONGEST_WINDOW), default=0)
    *short, long = LENGTHS
    return *short, max(long, passed + 72)


def against_own_caches(runner: Runner, vocab_size: int, lengths: Sequence[int] = LENGTHS) -> float:
    """Compare with mlx-lm's own caches; return the error, or raise `SelfCheckFailed`."""
    return _check(runner, vocab_size, lengths, _Own)


def against_dequantized(
    runner: Runner, vocab_size: int, lengths: Sequence[int] = LENGTHS, *, mixed: bool = False
) -> float:
    """Compare with dense copies of the rows; return the error, or raise `SelfCheckFailed`.

    ``mixed``: each row that is long enough has pages on all precision levels.
    """
    return _check(runner, vocab_size, lengths, _Held, mixed=mixed)


def _check(
    runner: Runner,
    vocab_size: int,
    lengths: Sequence[int],
    reference: MakeReference,
    *,
    mixed: bool = False,
) -> float:
    try:
        error, dtype = _run(runner, vocab_size, lengths, reference, mixed=mixed)
    except (SelfCheckFailed, MemoryError):
        raise
    except Exception as failed:  # models raise any type over a cache that they do not know
        raise SelfCheckFailed(explain_failure(failed)) from failed
    if math.isinf(error):
        raise SelfCheckFailed("its logits are not finite")
    if error > tolerance(dtype):
        raise SelfCheckFailed(f"its logits are off by {error:.2g} of the largest one")
    return error


def explain_failure(error: Exception) -> str:
    """Explain a model's failure over kvd's caches to the user."""
    text = str(error).strip()
    if _OPAQUE.search(text):
        return f"the model works on its keys and values itself ({_use(error)})"
    for sign, meaning in _MEANINGS.items():
        if re.search(sign, text, re.IGNORECASE):
            return meaning
    first = text.split("\n")[0][:200]
    if first.startswith("the model "):  # kvd's own views describe the failed request
        return first
    return f"the model fails over these caches: {type(error).__name__}: {first}".removesuffix(": ")


def _use(error: Exception) -> str:
    """Return how the model used a handle that stands for keys or values."""
    if isinstance(error, AttributeError):
        return f"it reads their `{error.name}`"
    function = re.match(r"(\w+)\(\)", str(error))
    return f"it passes them to `{function[1]}`" if function else "it computes with them"


def _mix(cache: Any, rows: list[Row]) -> None:
    """Spread each row's pages over its own level and all lower ones, in turn."""
    for index, store in enumerate(cache.stores):
        for row in (one.rows[index] for one in rows):
            levels = range(row.level, len(store.schemes))
            pages = list(row.pages)
            for place, level in enumerate(levels[1:], 1):
                if due := pages[place :: len(levels)]:
                    store.pages.convert(row.level, level, due, [row])


def _run(
    runner: Runner,
    vocab_size: int,
    lengths: Sequence[int],
    reference: MakeReference,
    *,
    mixed: bool,
) -> tuple[float, mx.Dtype]:
    """Prefill rows, decode them as one batch; return the error, and the logits' dtype.

    The error is that of the worst row. A row's error is the median over its steps, because a router
    that chooses a different expert due to rounding is no fault of the cache.
    """
    cache = runner.cache
    prompts = [
        [(17 * index + 5 * position) % vocab_size for position in range(length)]
        for index, length in enumerate(lengths)
    ]
    rows = [cache.new_row() for _ in prompts]
    errors: list[list[float]] = [[] for _ in rows]
    dtype = mx.float32
    try:
        for row, prompt in zip(rows, prompts, strict=True):
            for start in range(0, len(prompt), CHUNK):
                runner.prefill(row, prompt[start : start + CHUNK])
        if mixed:
            _mix(cache, rows)
        references = [reference(runner, *one) for one in zip(rows, prompts, strict=True)]
        for step in range(STEPS):
            tokens = [(3 + 11 * step + index) % vocab_size for index in range(len(rows))]
            if cache.needs_flush(rows):
                cache.flush()
            for one in references:
                one.before()
            got = runner.decode(rows, mx.array(tokens, mx.int32))
            mx.eval(got, cache.arrays())
            dtype = got.dtype
            for index, (one, token) in enumerate(zip(references, tokens, strict=True)):
                expected = runner.model(mx.array([[token]]), cache=one.caches())[0, -1]
                errors[index].append(_difference(got[index], expected))
    finally:
        for row in rows:
            cache.free(row)
        cache.shrink()
    return max(statistics.median(one) for one in errors), dtype


def _difference(got: mx.array, expected: mx.array) -> float:
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    error = float((mx.abs(got - expected).max() / mx.abs(expected).max()).item())  # type: ignore[arg-type]
    return math.inf if math.isnan(error) else error  # NaN is not a small error
