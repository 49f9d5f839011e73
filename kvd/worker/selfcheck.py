"""Is this model served right, here and now? Run at every load, before the first request.

Two questions, each with its own reference on the model's own shapes:

* does the model work with our caches at all: rows of unequal length with pages that are *not*
  quantized, against mlx-lm's own cache, one sequence at a time;
* is attention over quantized pages right on this device: the same step over our pages, and over
  a dense cache filled with what the pages stand for.

Trust nothing that was not checked: MLX has been seen to return wrong numbers from quantized
products on one backend while all others were right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvd.worker.cache.packed import page_product_by_copy
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import Scheme
from kvd.worker.runner import Runner
from protocol.errors import UnsupportedModel

Reference = Callable[[Runner, Row, list[int]], list[Any]]
"""Makes the caches for the reference pass of one row, whose prompt so far is given."""

LENGTHS = (2, 126, 200)
"""The second row seals its first page within the steps."""
CHUNK = 128
STEPS = 3


@dataclass(frozen=True)
class Verdict:
    """Which attention path serves this model, and how far it is from dense attention."""

    path: str
    error: float
    """Largest difference of a logit, relative to the largest logit."""


def tolerance(dtype: mx.Dtype) -> float:
    """Return the relative error of logits that counts as rounding."""
    return 1e-3 if dtype == mx.float32 else 5e-2


def check(runner: Runner, vocab_size: int) -> Verdict:
    """Choose the attention path of a runner whose store is still empty; leaves it empty.

    Raises `UnsupportedModel` if no path gives the model's own logits.
    """
    dense = Runner.of(runner.model, Scheme(16, 16), prefill_scratch=runner.store.prefill_scratch)
    try:
        _choose(dense, vocab_size, _own_cache)
    except (TypeError, AttributeError, IndexError) as touched:
        raise UnsupportedModel(
            f"the model works on its keys and values itself, which pages do not allow: {touched}"
        ) from touched
    return _choose(runner, vocab_size, _dequantized_cache)


def _choose(runner: Runner, vocab_size: int, reference: Reference) -> Verdict:
    """Try the products of pages, the faster one first; keep the first that is right."""
    failed = []
    for path, product in (
        ("gathered", runner.store.page_product),
        ("copied", page_product_by_copy),
    ):
        runner.store.page_product = product
        try:
            error = _run(runner, vocab_size, reference)
        except (RuntimeError, ValueError) as refused:  # no such operation on this device
            failed.append(f"{path} pages: {refused}")
            continue
        if error <= tolerance(runner.store.dtype):
            return Verdict(f"reference, {path} pages", error)
        failed.append(f"{path} pages: relative error {error:.2g}")
    raise UnsupportedModel(
        f"attention over {runner.store.scheme.name} pages fails its self-check here: "
        + "; ".join(failed)
    )


def _run(runner: Runner, vocab_size: int, reference: Reference) -> float:
    """Prefill rows, decode them as one batch; return the largest error of any logit."""
    store = runner.store
    prompts = [
        [(17 * index + 5 * position) % vocab_size for position in range(length)]
        for index, length in enumerate(LENGTHS)
    ]
    rows = [store.new_row() for _ in prompts]
    worst = 0.0
    try:
        for row, prompt in zip(rows, prompts, strict=True):
            for start in range(0, len(prompt), CHUNK):
                runner.prefill(row, prompt[start : start + CHUNK])
        for step in range(STEPS):
            tokens = [(3 + 11 * step + index) % vocab_size for index in range(len(rows))]
            if store.needs_flush(rows):
                store.flush()
            got = runner.decode(rows, mx.array(tokens, mx.int32))
            mx.eval(got, store.arrays())
            wanted = [
                runner.model(mx.array([[token]]), cache=reference(runner, row, prompt))[0, -1]
                for row, prompt, token in zip(rows, prompts, tokens, strict=True)
            ]
            mx.eval(wanted)
            worst = max([worst, *(_difference(*pair) for pair in zip(got, wanted, strict=True))])
            for prompt, token in zip(prompts, tokens, strict=True):
                prompt.append(token)
    finally:
        for row in rows:
            store.free(row)
        store.shrink()
    return worst


def _own_cache(runner: Runner, _row: Row, prompt: list[int]) -> list[Any]:
    """Return mlx-lm's own cache of the prompt so far."""
    caches = make_prompt_cache(runner.model)
    mx.eval(runner.model(mx.array([prompt]), cache=caches))
    return list(caches)


def _dequantized_cache(runner: Runner, row: Row, _prompt: list[int]) -> list[Any]:
    """Return dense caches that hold what the row attended to, but for the step's own token."""
    caches = []
    for layer in range(len(runner.store.layers)):
        cache = KVCache()
        cache.update_and_fetch(*(side[None, :, :-1] for side in runner.store.read(row, layer)))
        caches.append(cache)
    return caches


def _difference(got: mx.array, wanted: mx.array) -> float:
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    error = float((mx.abs(got - wanted).max() / mx.abs(wanted).max()).item())  # type: ignore[arg-type]
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not a small error
