"""Whether a runner gives the model's own logits, here and now.

Two questions, each with its own reference on the model's own shapes:

* does the model work with our caches at all: rows of unequal length with pages that are *not*
  quantized, against mlx-lm's own caches, one sequence at a time;
* is attention over quantized pages right on this device: the same steps over our pages, and over
  dense copies of what the pages stand for (`kvd.worker.reference`).

Trust nothing that was not checked: MLX has been seen to return wrong numbers from quantized
products on one backend while all others were right.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.worker.reference import held_caches
from kvd.worker.runner import Row, Runner

Before = Callable[[Runner, Row, list[int]], Any]
"""What a reference must know from before the step."""
Reference = Callable[[Runner, Row, list[int], Any], list[Any]]
"""Makes the caches for the reference pass of one row, whose prompt so far is given."""

LENGTHS = (2, 126, 200)
"""The second row seals its first page within the steps."""
CHUNK = 128
STEPS = 3


class Refused(Exception):
    """The model cannot be served this way; the text says why."""


def tolerance(dtype: mx.Dtype) -> float:
    """Return the relative error of logits that counts as rounding."""
    return 1e-3 if dtype == mx.float32 else 5e-2


def against_own_caches(runner: Runner, vocab_size: int) -> float:
    """Compare with mlx-lm's own caches; return the error. Raises `Refused`."""

    def own(one: Runner, _row: Row, prompt: list[int], _before: Any) -> list[Any]:
        caches: list[Any] = make_prompt_cache(one.model)
        if prompt:
            mx.eval(one.model(mx.array([prompt]), cache=caches))
        return caches

    return _checked(runner, vocab_size, lambda *_: None, own)


def against_dequantized(runner: Runner, vocab_size: int) -> float:
    """Compare with dense copies of what the rows hold; return the error. Raises `Refused`."""
    return _checked(
        runner,
        vocab_size,
        lambda one, row, _prompt: one.cache.states.snapshot(row),
        lambda one, row, _prompt, states: held_caches(one.cache, row, states, but=1),
    )


def _checked(runner: Runner, vocab_size: int, before: Before, reference: Reference) -> float:
    try:
        error, dtype = _run(runner, vocab_size, before, reference)
    except (TypeError, AttributeError, IndexError) as touched:
        raise Refused(f"the model works on its caches itself: {_first_line(touched)}") from touched
    except (RuntimeError, ValueError, NotImplementedError) as failed:
        raise Refused(_first_line(failed)) from failed
    if not error <= tolerance(dtype):
        raise Refused(f"its logits differ by {error:.2g}, relative")
    return error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def _run(
    runner: Runner, vocab_size: int, before: Before, reference: Reference
) -> tuple[float, mx.Dtype]:
    """Prefill rows, decode them as one batch; return the error, and the logits' dtype.

    The error is the worst row's; of a row's steps the middle one counts, since one expert that a
    router chooses by a rounding is no fault of the cache.
    """
    cache = runner.cache
    prompts = [
        [(17 * index + 5 * position) % vocab_size for position in range(length)]
        for index, length in enumerate(LENGTHS)
    ]
    rows = [cache.new_row() for _ in prompts]
    errors: list[list[float]] = [[] for _ in rows]
    dtype = mx.float32
    try:
        for row, prompt in zip(rows, prompts, strict=True):
            for start in range(0, len(prompt), CHUNK):
                runner.prefill(row, prompt[start : start + CHUNK])
        for step in range(STEPS):
            tokens = [(3 + 11 * step + index) % vocab_size for index in range(len(rows))]
            if cache.needs_flush(rows):
                cache.flush()
            known = [before(runner, row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
            got = runner.decode(rows, mx.array(tokens, mx.int32))
            mx.eval(got, cache.arrays())
            dtype = got.dtype
            for index, (row, prompt, token) in enumerate(zip(rows, prompts, tokens, strict=True)):
                caches = reference(runner, row, prompt, known[index])
                wanted = runner.model(mx.array([[token]]), cache=caches)[0, -1]
                errors[index].append(_difference(got[index], wanted))
                prompt.append(token)
    finally:
        for row in rows:
            cache.free(row)
        cache.shrink()
    return max(statistics.median(one) for one in errors), dtype


def _difference(got: mx.array, wanted: mx.array) -> float:
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    error = float((mx.abs(got - wanted).max() / mx.abs(wanted).max()).item())  # type: ignore[arg-type]
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not a small error
