"""Measures how quantized pages change a model: KL divergence, top-1 agreement, perplexity.

Every prompt is teacher-forced, in the order of real use: most of it is prefilled in chunks, and its
last tokens are decoded one by one. The reference is the same model over mlx-lm's own dense caches.
Only positions that attend to a quantized page count; the others are exact by construction.
"""

from __future__ import annotations

import math
import os
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.demo.recall import Tokenizer, make_recall_prompt
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.scheme import PAGE_TOKENS, Scheme, full_pages
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import probe
from kvd.worker.serving.probe import Served
from kvd.worker.serving.runner import Row, Runner
from protocol import paths
from protocol.errors import UnsupportedModel

CHUNK = 256
DECODED = PAGE_TOKENS
"""Tokens at the end of each prompt that are decoded: enough that one of them commits a page."""
SCRATCH = 256 * 1024 * 1024
TEXT_BYTES = 4 * 1024 * 1024
"""Most bytes that are read of the user's own text."""
_SMALL = 1.0
"""Largest difference of logarithms for which a KL term is computed with ``expm1``. For larger ones
that form is less exact than the other."""


@dataclass(frozen=True)
class Agreement:
    """How well a model over a lossy cache agrees with the same model over a dense cache."""

    positions: int
    kl: float
    """KL divergence from the dense distribution, mean over positions, in nats."""
    top1: float
    """Share of positions where both rank the same token first."""
    dense_nll: float
    """Mean negative log-likelihood of the true next token over the dense cache, in nats."""
    nll: float
    """Mean negative log-likelihood of the true next token over the lossy cache, in nats."""

    @property
    def perplexity_change(self) -> float:
        return math.expm1(self.nll - self.dense_nll)


@dataclass(frozen=True)
class Floor:
    """What a level must reach to be allowed."""

    max_kl: float = 0.02
    min_top1: float = 0.95

    def allows(self, agreement: Agreement) -> bool:
        """Return whether both limits hold; False for NaN."""
        return agreement.kl <= self.max_kl and agreement.top1 >= self.min_top1


class TooShortError(ValueError):
    """The prompts have no position that attends to a quantized page."""


class Tally:
    """Sums over positions, added chunk by chunk."""

    def __init__(self) -> None:
        self.positions = 0
        self._sums = [0.0] * 4

    def add(self, dense: Reference, lossy: mx.array, targets: mx.array) -> None:
        """Add positions: lossy logits ``[..., vocab]``, true next tokens ``[...]``."""
        sums = [one.sum() for one in dense.compare(lossy, targets)]
        mx.eval(sums)
        self.positions += targets.size
        self._sums = [
            total + float(one.item())  # type: ignore[arg-type]
            for total, one in zip(self._sums, sums, strict=True)
        ]

    def agreement(self) -> Agreement:
        """Return the means so far; raises `TooShortError` if no position was added."""
        if not self.positions:
            raise TooShortError("no position attended to a quantized page: give longer prompts")
        kl, top1, dense_nll, nll = (total / self.positions for total in self._sums)
        return Agreement(self.positions, kl, top1, dense_nll, nll)


@dataclass(frozen=True)
class Reference:
    """The distributions over the dense cache, in float32.

    Computed once for all lossy caches: a comparison takes longest for exponentials.
    """

    logs: mx.array
    """Log-probabilities, ``[..., vocab]``."""
    shares: mx.array
    """Probabilities, ``[..., vocab]``."""
    top: mx.array
    """The most likely tokens, ``[...]``."""

    @staticmethod
    def of(logits: mx.array) -> Reference:
        """Return the distributions of logits ``[..., vocab]``."""
        logs, shares = _distribution(logits)
        return Reference(logs, shares, mx.argmax(logs, axis=-1))

    def after(self, positions: int) -> Reference:
        """Return those after the first ``positions``."""
        return Reference(self.logs[positions:], self.shares[positions:], self.top[positions:])

    def compare(
        self, lossy: mx.array, targets: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Compare with logits ``[..., vocab]``, position by position; lazy.

        Returns ``[...]`` each: KL(dense || lossy) in nats, whether the top token is the same, and
        the negative log-likelihoods of ``targets`` over both.
        """
        logs, shares = _distribution(lossy)
        d = logs - self.logs
        # The sum of p (e^d - 1 - d) equals sum(p (log p - log q)), because p and q both sum to 1.
        # No term is negative and small terms do not cancel, so float32 suffices for sums far below
        # 1e-6.
        near = self.shares * (mx.expm1(mx.minimum(d, _SMALL)) - d)
        far = shares - self.shares * (1 + d)
        kl = mx.where(mx.abs(d) <= _SMALL, near, far).sum(axis=-1)
        same = self.top == mx.argmax(logs, axis=-1)
        dense_nll, nll = (
            -mx.take_along_axis(x, targets[..., None], axis=-1)[..., 0] for x in (self.logs, logs)
        )
        return kl, same.astype(mx.float32), dense_nll, nll


def _distribution(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return log-probabilities and probabilities, in float32; evaluated."""
    logits = logits.astype(mx.float32)
    logits = logits - logits.max(axis=-1, keepdims=True)
    powers = mx.exp(logits)
    total = powers.sum(axis=-1, keepdims=True)
    found = logits - mx.log(total), powers / total
    mx.eval(found)
    return found


def compare(
    dense: mx.array, lossy: mx.array, targets: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Compare logits ``[..., vocab]``, as `Reference.compare` does."""
    return Reference.of(dense).compare(lossy, targets)


def texts(tokenizer: Tokenizer, *, count: int = 4, tokens: int = 1024) -> list[list[int]]:
    """Return prompts as token ids, for a measurement without the user's own text.

    They are the recall tasks of `kvd.demo.recall`: prose that contains facts, a question about one
    of them at the end, and the answer. A lossy cache first damages retrieval from far back, which
    plain prose hides. The tasks are the same for every user and tokenizer.
    """
    tasks = (make_recall_prompt(seed, tokens, tokenizer) for seed in range(count))
    return [list(tokenizer.encode(f"{task.prompt} {task.answer}")) for task in tasks]


@dataclass(frozen=True)
class OwnText:
    """A text of the user, from a file."""

    name: str
    content: str

    @staticmethod
    def read(path: Path) -> OwnText:
        """Read the first `TEXT_BYTES` of a file.

        Raises ``ValueError`` if it cannot be read, is no regular file or is not UTF-8.
        """
        name = readable_name(path)
        if paths.exists(path) and not paths.is_file(path):  # to open a pipe could block
            raise ValueError(f"{name} is not a regular file")
        try:
            with path.open("rb") as file:
                found = file.read(TEXT_BYTES)
        except OSError as error:
            raise ValueError(f"cannot read {name}: {error.strerror}") from error
        try:  # a character that the limit cuts is left out
            decoder = getincrementaldecoder("utf-8-sig")()
            text = decoder.decode(found, final=len(found) < TEXT_BYTES)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 text (byte {error.start})") from error
        if "\0" in text:  # UTF-16 without a byte order mark can be valid UTF-8
            raise ValueError(f"{name} is not UTF-8 text (it contains null characters)")
        return OwnText(name, text)

    def prompts(self, tokenizer: Tokenizer, *, count: int, tokens: int) -> list[list[int]]:
        """Return ``count`` prompts of ``tokens`` token ids, evenly spread over the text.

        Prompts overlap if the text is short, and there are fewer if some would be equal. Raises
        ``ValueError`` if the text has fewer tokens than one prompt.
        """
        ids = list(tokenizer.encode(self.content))
        start = ids[:1] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else []
        body, size = ids[len(start) :], tokens - len(start)
        if len(body) < size:
            raise ValueError(
                f"{self.name} has {len(ids)} tokens, and a text needs {tokens}; give a longer file"
                " or fewer tokens (--tokens)"
            )
        last = len(body) - size
        firsts = dict.fromkeys(last * number // max(1, count - 1) for number in range(count))
        return [start + body[first : first + size] for first in firsts]


def readable_name(path: Path) -> str:
    """Return a path as valid text, whatever bytes it has."""
    return os.fsencode(path).decode("utf-8", "replace")


def serve(
    model: Any,
    schemes: Sequence[Scheme],
    mixes: Sequence[tuple[Scheme, ...] | None] = (),
    prefill_scratch: int = SCRATCH,
    library: ModuleType | None = None,
    kernels: FusedBackend | None = None,
) -> Runner:
    """Serve a model over kvd's pages, with one precision level per scheme.

    ``mixes``: as in `CacheSettings`. ``library``: of `kvd.worker.native`, if the weights were read
    with it. ``kernels``: of the device, which decode if they are right and fast. Without either,
    plain operations attend. The seam must be installed. Raises `UnsupportedModel` for a model that
    has no quantized keys and values.
    """
    vocab_size = model(mx.array([[0]])).shape[-1]
    settings = CacheSettings(tuple(schemes), tuple(mixes), scratch=prefill_scratch)
    served = probe.serve(model, settings, vocab_size, library, kernels)
    _check_quantized(served)
    return served.runner


def measure(
    runners: Sequence[Runner],
    prompts: Iterable[Sequence[int]],
    *,
    chunk: int = CHUNK,
    decoded: int = DECODED,
) -> list[Agreement]:
    """Run ``prompts`` on every precision level of runners of one model.

    Returns one measurement per level, runner by runner. Holds one prompt at a time: a dense cache,
    and one row per level. ``decoded``: tokens at the end of each prompt that are decoded; the
    others are prefilled in chunks of ``chunk``. Raises `TooShortError` if no prompt fills a page,
    which takes ``2 * 64`` tokens.
    """
    measured = [_Levels(runner) for runner in runners]
    for prompt in prompts:
        _follow(runners[0].model, list(prompt), measured, chunk, decoded)
    return [tally.agreement() for levels in measured for tally in levels.tallies]


def lowest_level(measured: Sequence[Agreement], floor: Floor) -> int | None:
    """Return the lowest level such that it and all levels above it reach the floor.

    0 is the top level. None: not even the top level reaches it, so the model must be served dense.
    """
    allowed = len(list(takewhile(floor.allows, measured)))
    return allowed - 1 if allowed else None


class _Levels:
    """The levels of a runner under measurement, with one row each at a time."""

    def __init__(self, runner: Runner) -> None:
        self.tallies = [Tally() for _ in range(runner.cache.levels)]
        self._runner = runner
        self._rows: list[Row] = []

    def start(self) -> None:
        cache = self._runner.cache
        self._rows = [cache.new_row(level) for level in range(cache.levels)]

    def end(self) -> None:
        for row in self._rows:
            self._runner.cache.free(row)
        self._rows = []

    def prefill(self, tokens: list[int]) -> Iterator[tuple[Tally, mx.array]]:
        """Yield each level's logits, ``[tokens, vocab]``, and where to add them."""
        for tally, row in zip(self.tallies, self._rows, strict=True):
            yield tally, self._runner.score(row, tokens)

    def decode(self, tokens: list[int]) -> Iterator[tuple[Tally, mx.array]]:
        """Yield as `prefill` does; each step decodes a token of all levels."""
        cache, rows = self._runner.cache, self._rows
        logits = []
        for token in tokens:
            if cache.needs_flush(rows):
                cache.flush()
            logits.append(self._runner.decode(rows, mx.array([token] * len(rows), mx.int32)))
            mx.eval(logits[-1], cache.arrays())
        cache.flush()
        for index, tally in enumerate(self.tallies):
            yield tally, mx.stack([one[index] for one in logits])


def _check_quantized(served: Served) -> None:
    """Reject a model without quantized pages: every level would compare it with itself."""
    cache = served.runner.cache
    if isinstance(cache, MlxLmCache):
        why = next(iter(served.reasons.values()), "")
        problem = f"is served over mlx-lm's own dense caches ({why})"
    elif not cache.stores:
        problem = "keeps recurrent states and no keys and values"
    else:
        return
    nothing = "nothing of it is quantized, so there is nothing to calibrate"
    raise UnsupportedModel(f"this model {problem}: {nothing}")


def _follow(
    model: Any, prompt: list[int], measured: list[_Levels], chunk: int, decoded: int
) -> None:
    """Run one prompt through the dense cache and all levels, side by side."""
    inputs, targets = prompt[:-1], mx.array(prompt[1:])
    prefilled = max(0, len(inputs) - decoded)
    truth = make_prompt_cache(model)
    try:
        for levels in measured:
            levels.start()
        for start in range(0, prefilled, chunk):
            stop = min(start + chunk, prefilled)
            dense = _dense(model, inputs[start:stop], truth)
            for tally, logits in chain(*(each.prefill(inputs[start:stop]) for each in measured)):
                if full_pages(start):
                    tally.add(dense, logits, targets[start:stop])
        if not decoded:
            return
        dense = _dense(model, inputs[prefilled:], truth)
        exact = max(0, 2 * PAGE_TOKENS - 1 - prefilled)  # steps that attend to no page yet
        for tally, logits in chain(*(each.decode(inputs[prefilled:]) for each in measured)):
            if exact < logits.shape[0]:
                tally.add(dense.after(exact), logits[exact:], targets[prefilled + exact :])
    finally:
        for levels in measured:
            levels.end()


def _dense(model: Any, tokens: list[int], caches: list[Any]) -> Reference:
    return Reference.of(model(mx.array([tokens]), cache=caches)[0])
