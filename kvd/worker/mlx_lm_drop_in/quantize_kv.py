"""Quantized, paged caches for a model in mlx-lm, without the daemon: one call installs them.

::

    from kvd.worker.mlx_lm_drop_in.quantize_kv import install, quantize_kv

    install()                                  # before mlx-lm imports the model's module
    model, tokenizer = mlx_lm.load(path)
    quantize_kv(model, "k8v4")

From then on everything in mlx-lm that makes caches for this model makes ours: `generate`,
`stream_generate`, `BatchGenerator`, its server. Does not cover: budgets, admission, the daemon.
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
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import Scheme
from kvd.worker.mlx_lm_drop_in.caches import (
    DropInKVCache,
    DropInRotatingKVCache,
    schemes_of,
)
from kvd.worker.mlx_lm_drop_in.shared_store import SharedStore
from kvd.worker.serving import seam
from kvd.worker.serving.selfcheck import STEPS, explain_failure, tolerance
from protocol.errors import UnsupportedModel

Maker = Callable[[], Any]
"""Makes an empty cache for one layer, or one for each."""

LENGTHS = (5, 130)
"""Tokens of the prompts that a model is tried with; the second one fills a page."""


def install() -> None:
    """Make mlx-lm's models able to use our caches, and its `load_prompt_cache` to read them.

    Must run before a model's module is imported; raises ``RuntimeError`` if one has been.
    """
    seam.install()
    for kind in (DropInKVCache, DropInRotatingKVCache):
        # `load_prompt_cache` looks classes up by name among its own.
        setattr(upstream, kind.__name__, kind)


class QuantizedKV:
    """The caches of one model: makes them, and knows what all of them together hold."""

    def __init__(self, makers: list[Maker], stores: list[SharedStore]) -> None:
        self._makers = makers
        self.stores = stores

    @classmethod
    def like(
        cls, caches: list[Any], schemes: Sequence[Scheme], quantized_start: int = 0
    ) -> QuantizedKV:
        """Make our counterparts of mlx-lm's caches; `UnsupportedModel` where there are none."""
        stores: list[SharedStore] = []

        def shared(kind: Kind) -> SharedStore:
            stores.append(SharedStore(schemes, kind, quantized_start=quantized_start, home=True))
            return stores[-1]

        return cls([_maker(cache, shared) for cache in caches], stores)

    def make_cache(self) -> list[Any]:
        """Return empty caches for one sequence, one a layer."""
        return [make() for make in self._makers]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and tails, used or free, of all caches that are alive."""
        return sum(store.nbytes for store in self.stores)


def quantize_kv(
    model: Any,
    scheme: str | Scheme = "k8v4",
    *,
    group_size: int = 64,
    quantized_kv_start: int = 0,
    max_kv_size: int | None = None,
) -> QuantizedKV:
    """Install our caches as the model's own; again to change the scheme for new caches.

    ``scheme`` is such as ``"k8v4"``, ``group_size`` 32, 64 or 128 (keys: at most 64). A sequence is
    quantized from ``quantized_kv_start`` tokens on. ``max_kv_size`` bounds, as in mlx-lm, the
    layers of models that make no caches of their own; four first tokens stay.

    The model is tried first: without quantization it must give the logits that it gives with its
    own caches, alone and, where it takes several sequences, in a batch.

    Raises `UnsupportedModel` if the model keeps anything else, works on its keys and values
    itself, or gives other logits; ``ValueError`` for a scheme that does not exist;
    ``RuntimeError`` as `install`. What was installed before stays then.
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
    """Return what makes our counterpart of one of mlx-lm's caches."""
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
        f"this model keeps a {type(cache).__name__} for some layers, which has no pages",
        caches=[type(cache).__name__],
    )


def _try(model: Any, installed: QuantizedKV) -> list[bool]:
    """Run the model over caches like these; return which of them are asked again in a pass.

    Raises `UnsupportedModel` with the reason if it cannot have them.
    """
    # As the model is, not as it is limited: chunks beyond `max_kv_size` do not see in mlx-lm what
    # it keeps of the beginning.
    own = partial(make_prompt_cache, model)
    dense = QuantizedKV.like(own(), [Scheme(16, 16)])
    try:
        trial = Trial(model, own, dense.make_cache)
        worst = max(trial.alone(), trial.together())
        finite = trial.read(installed.make_cache())
    except MemoryError:
        raise
    except Exception as failed:  # models raise what they like about a cache that is not theirs
        why = explain_failure(failed)
        raise UnsupportedModel(f"this model cannot have paged caches: {why}") from failed
    if math.isinf(worst) or not finite:
        raise UnsupportedModel("over paged caches this model's logits are not finite")
    if worst > tolerance(trial.dtype):
        raise UnsupportedModel(
            f"over paged caches, not quantized, this model's logits are off by {worst:.2g} of the"
            " largest one"
        )
    return [store.asked_again for store in dense.stores]


class Trial:
    """Two sequences of unequal length, over a model's own caches and over ours.

    Of a sequence's steps the middle error counts: one expert that a router chooses by a rounding is
    no fault of the cache.
    """

    def __init__(self, model: Any, own: Maker, ours: Maker) -> None:
        self._model = model
        self._own = [own() for _ in LENGTHS]
        self._ours = [ours() for _ in LENGTHS]
        logits = model(mx.array([[0]]), cache=own())
        self.dtype: mx.Dtype = logits.dtype
        self._vocabulary = logits.shape[-1]
        self._steps = itertools.count()

    def read(self, caches: list[Any]) -> bool:
        """Read the longer prompt, and a token; return whether the logits are finite."""
        prompt = self._prompt(len(LENGTHS) - 1)
        logits = [self._step(tokens, caches) for tokens in ([prompt], [prompt[:1]])]
        return bool(mx.isfinite(mx.stack(logits)).all().item())

    def alone(self) -> float:
        """Read each prompt, then some tokens; return the error."""
        errors = []
        for index, (own, ours) in enumerate(zip(self._own, self._ours, strict=True)):
            prompt = self._prompt(index)
            passes = [prompt, *(self._prompt(index, count=1) for _ in range(STEPS - 1))]
            errors.append([self._error([tokens], own, ours) for tokens in passes])
        return max(statistics.median(mine) for mine in errors)

    def together(self) -> float:
        """Go on as a batch; return the error, 0 where the model's own caches make no batch."""
        errors: list[list[float]] = [[] for _ in LENGTHS]
        try:
            self._step([[0] for _ in LENGTHS], _merged(self._own))
        except Exception:  # noqa: BLE001 - whatever it is, it is not about our caches
            return 0.0
        own, ours = _merged(self._own), _merged(self._ours)
        for _ in range(STEPS):
            tokens = [self._prompt(index, count=1) for index in range(len(LENGTHS))]
            alone = [self._step([mine], one) for mine, one in zip(tokens, self._own, strict=True)]
            batch, got = self._step(tokens, own), self._step(tokens, ours)
            for index, mine in enumerate(errors):
                # mlx-lm's own batches are not right for every model; ours may be as they are.
                wanted = alone[index][0], batch[index]
                mine.append(min(_difference(got[index], one) for one in wanted))
        return max(statistics.median(mine) for mine in errors)

    def _prompt(self, index: int, count: int | None = None) -> list[int]:
        seed = 17 * index + 11 * next(self._steps)
        return [(seed + 5 * at) % self._vocabulary for at in range(count or LENGTHS[index])]

    def _error(self, tokens: list[list[int]], own: list[Any], ours: list[Any]) -> float:
        return _difference(self._step(tokens, ours), self._step(tokens, own))

    def _step(self, tokens: list[list[int]], caches: list[Any]) -> mx.array:
        logits: mx.array = self._model(mx.array(tokens), cache=caches)[:, -1].astype(mx.float32)
        mx.eval(logits)
        return logits


def _merged(sequences: list[list[Any]]) -> list[Any]:
    return [layer[0].merge(list(layer)) for layer in zip(*sequences, strict=True)]


def _difference(got: mx.array, wanted: mx.array) -> float:
    error = float((mx.abs(got - wanted).max() / mx.abs(wanted).max()).item())  # type: ignore[arg-type]
    return math.inf if math.isnan(error) else error  # NaN is not a small error
