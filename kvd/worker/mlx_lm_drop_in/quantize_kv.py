"""Makes a model in mlx-lm use kvd's quantized, paged caches, without the daemon.

::

    from kvd.worker.mlx_lm_drop_in.quantize_kv import install, quantize_kv

    install()                                  # before mlx-lm imports the model's module
    model, tokenizer = mlx_lm.load(path)
    quantize_kv(model, "k8v4")

From then on, everything in mlx-lm that creates caches for this model creates kvd's: `generate`,
`stream_generate`, `BatchGenerator` and its server. There is no memory budget and no admission.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import Scheme
from kvd.worker.mlx_lm_drop_in.caches import DropInKVCache, DropInRotatingKVCache, schemes_of
from kvd.worker.mlx_lm_drop_in.shared_store import SharedStore
from kvd.worker.serving import seam
from kvd.worker.serving.selfcheck import STEPS, explain_failure, tolerance
from protocol.errors import UnsupportedModel

Maker = Callable[[], Any]
"""Creates an empty cache for one layer, or one for each layer."""

LENGTHS = (5, 130)
"""Tokens of the prompts that `Trial` uses. The second one fills a page."""


def install() -> None:
    """Enable mlx-lm's models to use kvd's caches, and its `load_prompt_cache` to read them.

    Must run before a model's module is imported; raises ``RuntimeError`` otherwise.
    """
    seam.install()
    for kind in (DropInKVCache, DropInRotatingKVCache):
        # `load_prompt_cache` finds classes by name in mlx-lm's own module.
        setattr(upstream, kind.__name__, kind)


class QuantizedKV:
    """Creates the caches of one model, and counts the bytes of all of them."""

    def __init__(self, makers: list[Maker], stores: list[SharedStore]) -> None:
        self._makers = makers
        self.stores = stores

    @classmethod
    def like(
        cls, caches: list[Any], schemes: Sequence[Scheme], quantized_start: int = 0
    ) -> QuantizedKV:
        """Return kvd's counterparts of mlx-lm's caches, or raise `UnsupportedModel`."""
        stores: list[SharedStore] = []

        def shared(kind: Kind) -> SharedStore:
            stores.append(SharedStore(schemes, kind, quantized_start=quantized_start, home=True))
            return stores[-1]

        return cls([_maker(cache, shared) for cache in caches], stores)

    def make_cache(self) -> list[Any]:
        """Return empty caches for one sequence, one per layer."""
        return [make() for make in self._makers]

    @property
    def nbytes(self) -> int:
        """Bytes of pages and tails, used or free, of all caches that are alive."""
        return sum(store.nbytes for store in self.stores)


def quantize_kv(
    model: Any,
    scheme: str | Scheme = "k8v4",
    *,
    group_size: int = 64,
    quantized_kv_start: int = 0,
    max_kv_size: int | None = None,
) -> QuantizedKV:
    """Make the model create kvd's caches. Call it again to change the scheme of new caches.

    ``scheme`` is a KV scheme such as ``"k8v4"``; ``group_size`` is 32, 64 or 128 (keys: at most
    64). Sequences shorter than ``quantized_kv_start`` tokens are not quantized. As in mlx-lm,
    ``max_kv_size`` sets a window for models that create no caches of their own; the first four
    tokens stay visible.

    First, the model is tested: without quantization it must give the same logits as with its own
    caches, with one sequence and, if the model takes batches, with two.

    Raises `UnsupportedModel` if the model has caches of unknown classes, computes with keys and
    values itself, or gives different logits; ``ValueError`` for an unknown scheme; ``RuntimeError``
    like `install`. After an error, caches that were installed before stay installed.
    """
    install()
    schemes = schemes_of(scheme, group_size, quantized_kv_start)
    before = model.__dict__.get("make_cache")
    if isinstance(getattr(before, "__self__", None), QuantizedKV):
        del model.make_cache
    else:
        before = None
    try:
        caches = make_prompt_cache(model, max_kv_size)
        installed = QuantizedKV.like(caches, schemes, quantized_kv_start)
        for store, asked in zip(installed.stores, _try(model, installed), strict=True):
            store.keeps_reading = asked
    except BaseException:
        if before is not None:
            model.make_cache = before
        raise
    model.make_cache = installed.make_cache
    return installed


def _maker(cache: Any, shared: Callable[[Kind], SharedStore]) -> Maker:
    """Return a function that creates kvd's counterpart of one of mlx-lm's caches."""
    store: SharedStore
    if type(cache) is KVCache:
        store = shared(FULL)
        return lambda: DropInKVCache.on(store)
    if type(cache) is RotatingKVCache:
        store = shared(Kind(window=cache.max_size, keep=cache.keep))
        return lambda: DropInRotatingKVCache.on(store)
    if type(cache) is ArraysCache:
        size = len(cache.cache)
        return lambda: ArraysCache(size)
    if type(cache) is CacheList:
        makers = [_maker(one, shared) for one in cache.caches]
        return lambda: CacheList(*(make() for make in makers))
    raise UnsupportedModel(
        f"this model has a {type(cache).__name__} in some layers, which kvd cannot page",
        caches=[type(cache).__name__],
    )


def _try(model: Any, installed: QuantizedKV) -> list[bool]:
    """Return which caches are read more than once in a pass, or raise `UnsupportedModel`."""
    # Without `max_kv_size`: in mlx-lm, chunks longer than it do not see the kept first tokens.
    own = partial(make_prompt_cache, model)
    dense = QuantizedKV.like(own(), [Scheme(16, 16)])
    try:
        trial = Trial(model, own, dense.make_cache)
        worst = max(trial.alone(), trial.together())
        finite = trial.read(installed.make_cache())
    except MemoryError:
        raise
    except Exception as failed:  # models may raise anything for an unknown cache
        why = explain_failure(failed)
        raise UnsupportedModel(f"this model cannot use paged caches: {why}") from failed
    if math.isinf(worst) or not finite:
        raise UnsupportedModel("with paged caches, this model's logits are not finite")
    if worst > tolerance(trial.dtype):
        raise UnsupportedModel(
            f"with paged caches and no quantization, this model's logits differ by {worst:.2g} of"
            " the largest one"
        )
    return [store.asked_again for store in dense.stores]


class Trial:
    """Two sequences of unequal length, with a model's own caches and with kvd's.

    A sequence's error is the median over its steps, because rounding may make a router choose a
    different expert.
    """

    def __init__(self, model: Any, own: Maker, paged: Maker) -> None:
        self._model = model
        self._own = [own() for _ in LENGTHS]
        self._paged = [paged() for _ in LENGTHS]
        logits = model(mx.array([[0]]), cache=own())
        self.dtype: mx.Dtype = logits.dtype
        self._vocabulary = logits.shape[-1]
        self._steps = itertools.count()

    def read(self, caches: list[Any]) -> bool:
        """Prefill the longer prompt and decode a token. Returns whether the logits are finite."""
        prompt = self._prompt(len(LENGTHS) - 1)
        logits = [self._step(tokens, caches) for tokens in ([prompt], [prompt[:1]])]
        return bool(mx.isfinite(mx.stack(logits)).all().item())

    def alone(self) -> float:
        """Prefill each prompt and decode some tokens. Returns the error."""
        errors = []
        for index, (own, paged) in enumerate(zip(self._own, self._paged, strict=True)):
            prompt = self._prompt(index)
            passes = [prompt, *(self._prompt(index, count=1) for _ in range(STEPS - 1))]
            pairs = ((self._step([tokens], paged), self._step([tokens], own)) for tokens in passes)
            errors.append([_difference(*pair) for pair in pairs])
        return max(statistics.median(mine) for mine in errors)

    def together(self) -> float:
        """Continue as a batch. Returns the error; 0 if the model's own caches do not merge."""
        errors: list[list[float]] = [[] for _ in LENGTHS]
        try:
            self._step([[0] for _ in LENGTHS], _merged(self._own))
        except Exception:  # noqa: BLE001 - no error here is about kvd's caches
            return 0.0
        own, paged = _merged(self._own), _merged(self._paged)
        for _ in range(STEPS):
            tokens = [self._prompt(index, count=1) for index in range(len(LENGTHS))]
            alone = [self._step([mine], one) for mine, one in zip(tokens, self._own, strict=True)]
            batch, got = self._step(tokens, own), self._step(tokens, paged)
            for index, mine in enumerate(errors):
                # mlx-lm's batches are wrong for some models, so either result is accepted.
                wanted = alone[index][0], batch[index]
                mine.append(min(_difference(got[index], one) for one in wanted))
        return max(statistics.median(mine) for mine in errors)

    def _prompt(self, index: int, count: int | None = None) -> list[int]:
        seed = 17 * index + 11 * next(self._steps)
        return [(seed + 5 * at) % self._vocabulary for at in range(count or LENGTHS[index])]

    def _step(self, tokens: list[list[int]], caches: list[Any]) -> mx.array:
        logits: mx.array = self._model(mx.array(tokens), cache=caches)[:, -1].astype(mx.float32)
        mx.eval(logits)
        return logits


def _merged(sequences: list[list[Any]]) -> list[Any]:
    return [layer[0].merge(list(layer)) for layer in zip(*sequences, strict=True)]


def _difference(got: mx.array, wanted: mx.array) -> float:
    error = float((mx.abs(got - wanted).max() / mx.abs(wanted).max()).item())  # type: ignore[arg-type]
    return math.inf if math.isnan(error) else error  # NaN counts as a large error
