"""Estimates what quantizing the keys or the values of each layer would cost, without measuring it.

One layer often causes nearly all of the loss, and the error of its attention does not show which
one. The loss is the KL divergence between the next tokens' distributions. For a small error ``d``
of keys and values it is half the mean of ``(g . d)^2``, where ``g`` is the gradient of the log
probability of a token that is drawn from the model itself (the Fisher information). A single
backward pass has the gradients of all layers. The errors of elements are taken as independent, and
evenly distributed over a quantization step. So a side at ``b`` bits costs ``c / (2^b - 1)^2``, and
the probe finds the one number ``c`` of each side.

Only tokens whose pages a product would have quantized count: the newest `EXACT` tokens before the
queries are exact, as in a row's tail. With gradients to all tokens, layers that attend to the
previous token look delicate, and the estimate is useless.

The work is split into short units, so that it fits between requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.native import layers, operations
from kvd.worker.process.shortage import shortage_of
from kvd.worker.serving import probe
from kvd.worker.serving.bit_mix import WIDTHS, LayerSides, Side
from kvd.worker.serving.reference import DenseKVCache

QUANTIZED = 3 * PAGE_TOKENS
"""Tokens at the beginning whose keys and values count as quantized."""
EXACT = PAGE_TOKENS
"""Tokens between these and the first query."""
QUERIES = 64
"""Tokens whose next token is drawn."""
TOKENS = QUANTIZED + EXACT + QUERIES
UNITS = (64, 32, 16, 8, 4)
"""Tokens of a unit, the largest first."""
CPU_UNIT = 16
"""Tokens of a unit on a CPU, where a unit takes as long as a short prompt."""
_BACKWARD = 8
"""Arrays that a backward pass holds for each output of a linear layer, at most (measured: 5)."""

_KEPT = 5
"""Arrays as large as the keys and values of the text, at most."""
_EXPANDED = 2
"""Arrays as large as the heads' keys and values, where those are products of latents, at most."""
_STATES = 8
"""Arrays as large as a recurrent state, at most, besides copies and those of each token."""
_TOKEN_STATES = 4
"""Arrays as large as a recurrent state that a backward pass holds for each token, at most, if a
token's inputs to the recurrence are smaller than the state (measured: 2)."""
_EXPANDED_STATES = 8
"""Replaces `_TOKEN_STATES` where the inputs are as large as the state."""
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
"""Names of the number of query heads in mlx-lm's models and their settings."""


class SideCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found about one layer."""

    layer: int
    """The layer's number among the model's caches."""
    kind: str
    """Its attention kind, such as ``full``."""
    key_elements: int
    """Elements of the keys of one token, in all heads."""
    value_elements: int
    """Elements of the values of one token, in all heads."""
    keys: float
    """KL divergence in nats if only the keys are quantized, times ``(2^bits - 1)^2``."""
    values: float
    """KL divergence if only the values are quantized, times the same factor."""

    def sides(self) -> LayerSides:
        return LayerSides(
            self.layer,
            self.kind,
            Side(self.key_elements, _losses(self.keys)),
            Side(self.value_elements, _losses(self.values)),
        )


def _losses(cost: float) -> dict[int, float]:
    return {bits: cost / (2**bits - 1) ** 2 for bits in WIDTHS}


class NoEstimateError(Exception):
    """The model has no gradients, or they are not finite. The text says why.

    ``lasting``: whether another attempt would fail too.
    """

    def __init__(self, why: str, *, lasting: bool = True) -> None:
        super().__init__(why)
        self.lasting = lasting


class _Cache(DenseKVCache):
    """A layer's keys and values. It begins empty, or with arrays whose gradients are computed."""

    def __init__(
        self, kind: Kind, keys: mx.array | None = None, values: mx.array | None = None
    ) -> None:
        length = 0 if keys is None else keys.shape[2]
        # Without arrays until the first tokens.
        super().__init__(keys, values, list(range(length)), length, kind)  # type: ignore[arg-type]
        self.kind = kind

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self.offset:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        return super().update_and_fetch(keys, values)


class BitProbe:
    """The probe of one model. `advance` runs a unit; after the last one, `costs` has the result.

    ``ids``: `TOKENS` token ids of a text. ``unit``: tokens of a unit, one of `UNITS`. ``memory``:
    bytes that the probe may hold. Raises `UnknownCacheError` for caches that kvd does not know.
    """

    def __init__(self, model: Any, ids: Sequence[int], *, unit: int, memory: int) -> None:
        if len(ids) != TOKENS or unit not in UNITS:
            raise ValueError(f"{len(ids)} tokens in units of {unit}: {TOKENS} in {UNITS} needed")
        self._model = model
        self._ids = mx.array([list(ids)])
        self._caches = [_own_cache(cache) for cache in make_prompt_cache(model)]
        self._unit = unit
        self._memory = memory
        self._read = 0
        self._states: dict[int, list[list[Any]]] = {}
        """Recurrent states before each unit of queries, by its first token."""
        self._drawn = QUANTIZED + EXACT
        self._sums: list[tuple[mx.array, mx.array]] = []

    @property
    def units(self) -> int:
        """Units that are left."""
        last = TOKENS - self._unit
        return (last - self._read + TOKENS - self._drawn) // self._unit

    @property
    def keys_fit(self) -> bool:
        """Whether no layer has more elements of keys than of values, as far as is known."""
        kept = self._attention()
        return bool(kept) and all(leaf.keys.nbytes <= leaf.values.nbytes for leaf in kept)

    @property
    def held_bytes(self) -> int:
        """Bytes that the probe holds between units, at most; 0 before the first unit."""
        states = QUERIES // self._unit + self._unit  # the copies, and those of a unit's tokens
        return self._text_bytes() + (1 + states) * self._state_bytes()

    def advance(self) -> None:
        """Run the next unit. Raises `NoEstimateError`, and ``MemoryError``."""
        try:
            with layers.with_gradients(self._model), operations.paused():
                if self._read < TOKENS - self._unit:
                    self._read_unit()
                else:
                    self._draw_unit()
        except (MemoryError, NoEstimateError):
            raise
        except Exception as failed:  # models raise any type
            if (short := shortage_of(failed)) is not None:
                raise short from failed
            raise NoEstimateError(f"{type(failed).__name__}: {failed}"[:200]) from failed

    def costs(self) -> list[SideCosts]:
        """Return the costs of each layer that keeps keys and values; raises `NoEstimateError`."""
        found = [self._cost_of(layer, cache) for layer, cache in enumerate(self._caches)]
        return [one for one in found if one is not None]

    def _read_unit(self) -> None:
        start, stop = self._read, self._read + self._unit
        if start >= QUANTIZED + EXACT:
            self._states[start] = self._copied_states()
        mx.eval(self._model(self._ids[:, start:stop], cache=self._caches), _arrays(self._caches))
        self._read = stop
        if start == 0:
            self._choose_unit()
        if stop == TOKENS - self._unit:
            self._states[stop] = self._copied_states()

    def _copied_states(self) -> list[list[Any]]:
        """Return copies of the states. A state can be a view of those of all tokens of a unit."""
        copies = [[None if one is None else one * 1 for one in each] for each in self._recurrent()]
        mx.eval(copies)
        return copies

    def _recurrent(self) -> list[list[Any]]:
        return [list(leaf.cache) for leaf in self._leaves() if isinstance(leaf, ArraysCache)]

    def _leaves(self) -> Iterator[Any]:
        for cache in self._caches:
            yield from probe.leaves(cache)

    def _attention(self) -> list[_Cache]:
        """Return the caches that have keys."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, _Cache) and leaf.offset]

    def _choose_unit(self) -> None:
        """Choose units of queries that fit the memory; raises `NoEstimateError`."""
        if not self._attention():
            raise NoEstimateError("no layer keeps keys and values")
        units = [unit for unit in UNITS if unit <= self._unit]
        fitting = [unit for unit in units if self._needed(unit) <= self._memory]
        if not fitting:
            needed = -(-self._needed(units[-1]) >> 20)
            raise NoEstimateError(
                f"it needs {needed} MiB, and {self._memory >> 20} MiB are free", lasting=False
            )
        self._unit = fitting[0]

    def _needed(self, unit: int) -> int:
        """Return an upper estimate of the bytes of a probe with such units; a first one is read."""
        model, kept = self._model, len(self._attention())
        attention = kept
        if kept == len(self._caches):
            # Layers that read the keys and values of others have no cache, but their own gradients.
            attention = max(kept, len(getattr(model, "layers", ())))
        # The text's own, those of a unit with the queries', the gradients, and copies of heads.
        held = _KEPT * self._text_bytes() * attention // kept
        held += 4 * _EXPANDED * TOKENS * _expanded(model)
        token = 4 * _BACKWARD * _outputs(model) + 12 * TOKENS * attention * _heads(model)
        states = self._state_bytes()
        held += (_STATES + QUERIES // unit) * states
        if not _expands_states(model):
            return int(held + unit * (token + _TOKEN_STATES * states))
        # The gradient of each token's inputs is as large as the inputs of all tokens.
        needed = held + unit * (token + (_EXPANDED_STATES + unit) * states)
        # The first unit has more tokens if its size turns out to be too large.
        return int(max(needed, held + self._unit * _EXPANDED_STATES * states))

    def _text_bytes(self) -> int:
        """Return the bytes of the whole text's keys and values."""
        kept = sum(leaf.keys.nbytes + leaf.values.nbytes for leaf in self._attention())
        return int(kept) * TOKENS // max(1, self._read)

    def _state_bytes(self) -> int:
        arrays = (one for each in self._recurrent() for one in each)
        return sum(one.nbytes for one in arrays if one is not None)

    def _draw_unit(self) -> None:
        start, stop = self._drawn, self._drawn + self._unit
        key = mx.random.key(start)

        def surprise(sides: list[tuple[mx.array, mx.array]]) -> mx.array:
            caches = self._caches_at(start, sides)
            logits = self._model(self._ids[:, start:stop], cache=caches).astype(mx.float32)
            drawn = mx.stop_gradient(mx.random.categorical(logits, key=key))
            # An index and its gradient would each compile a module on CUDA, which takes seconds.
            is_drawn = mx.arange(logits.shape[-1]) == drawn[..., None]
            chosen = mx.where(is_drawn, logits, 0.0).sum(axis=-1)
            return (mx.logsumexp(logits, axis=-1) - chosen).sum()

        sides = [
            (leaf.keys[:, :, :QUANTIZED], leaf.values[:, :, :QUANTIZED])
            for leaf in self._attention()
        ]
        gradients = mx.grad(surprise)(sides)
        found = [
            (_weighted(keys, k, per_token=False), _weighted(values, v, per_token=True))
            for (keys, values), (k, v) in zip(sides, gradients, strict=True)
        ]
        before = self._sums or [(mx.array(0.0), mx.array(0.0))] * len(found)
        self._sums = [(a + k, b + v) for (a, b), (k, v) in zip(before, found, strict=True)]
        mx.eval(self._sums)
        self._drawn = stop

    def _caches_at(self, start: int, sides: list[tuple[mx.array, mx.array]]) -> list[Any]:
        """Return caches of the tokens before ``start``, of which the first are ``sides``."""
        given, states = iter(sides), iter(self._states[start])

        def leaf_at(leaf: Any) -> Any:
            if isinstance(leaf, ArraysCache):
                copy = ArraysCache(len(leaf.cache))
                copy.cache = list(next(states))
                return copy
            if not isinstance(leaf, _Cache) or not leaf.offset:
                return KVCache()
            first, rest = next(given), (leaf.keys, leaf.values)
            both = (
                mx.concatenate([one, whole[:, :, QUANTIZED:start]], axis=2)
                for one, whole in zip(first, rest, strict=True)
            )
            return _Cache(leaf.kind, *both)

        return [
            CacheList(*map(leaf_at, cache.caches))
            if isinstance(cache, CacheList)
            else leaf_at(cache)
            for cache in self._caches
        ]

    def _cost_of(self, layer: int, cache: Any) -> SideCosts | None:
        attention = self._attention()
        mine = [
            at
            for at, leaf in enumerate(attention)
            if any(leaf is one for one in probe.leaves(cache))
        ]
        if not mine:
            return None
        parts = [
            probe.attention_part(attention[at].kind, attention[at].keys, attention[at].values)
            for at in mine
        ]
        # The variance of an even distribution over a step is a twelfth of its square.
        keys, values = (
            _number(sum((self._sums[at][side] for at in mine), mx.array(0.0)) / (24 * QUERIES))
            for side in (0, 1)
        )
        if not math.isfinite(keys + values):
            raise NoEstimateError("the gradients are not finite")
        return SideCosts(
            layer=layer,
            kind=parts[0].kind.name,
            key_elements=sum(part.geometry.kv_heads * part.geometry.k_dim for part in parts),
            value_elements=sum(part.geometry.kv_heads * part.geometry.v_dim for part in parts),
            keys=keys,
            values=values,
        )


def _own_cache(cache: Any) -> Any:
    """Return the probe's cache for one of mlx-lm's."""
    if isinstance(cache, CacheList):
        return CacheList(*map(_own_cache, cache.caches))
    return cache if type(cache) is ArraysCache else _Cache(probe.kind_of(cache))


def _arrays(caches: Sequence[Any]) -> list[mx.array]:
    leaves = [leaf for cache in caches for leaf in probe.leaves(cache)]
    found = [
        leaf.cache if isinstance(leaf, ArraysCache) else [leaf.keys, leaf.values] for leaf in leaves
    ]
    return [array for arrays in found for array in arrays if array is not None]


def _weighted(x: mx.array, gradient: mx.array, *, per_token: bool) -> mx.array:
    """Return the sum of the squared gradients, each times the squared range of its group.

    ``x``: ``[1, heads, tokens, dim]``. Groups are those of pages: along the channels of a token, or
    along the tokens of a channel.
    """
    _, heads, tokens, dim = x.shape
    if per_token and dim % PAGE_TOKENS == 0:
        shape: tuple[int, ...] = (heads, tokens, dim // PAGE_TOKENS, PAGE_TOKENS)
        axis = 3
    else:
        shape, axis = (heads, tokens // PAGE_TOKENS, PAGE_TOKENS, dim), 2
    groups = x.astype(mx.float32).reshape(shape)
    squares = mx.square(gradient.astype(mx.float32)).reshape(shape).sum(axis=axis)
    return (mx.square(groups.max(axis=axis) - groups.min(axis=axis)) * squares).sum()


def _outputs(model: Any) -> int:
    """Return the number of outputs of all linear layers, for one token."""
    experts = getattr(getattr(model, "args", None), "num_experts_per_tok", None) or 8
    total = 0
    for _, module in model.named_modules():
        if (outputs := getattr(module, "outputs", None)) is not None:  # packed
            total += int(outputs)
        elif (weight := module.get("weight")) is not None and weight.ndim > 1:
            total += weight.shape[-2] * (experts if weight.ndim > 2 else 1)
    return total


def _expanded(model: Any) -> int:
    """Return the channels of all heads that models compute from latents, for one token."""
    total = 0
    for _, module in model.named_modules():
        if isinstance(module, (MultiLinear, QuantizedMultiLinear)):
            heads, outputs, inputs = module.weight.shape
            if isinstance(module, QuantizedMultiLinear):
                inputs = module.scales.shape[-1] * module.group_size
            total += heads * min(outputs, inputs)
    return total


def _expands_states(model: Any) -> bool:
    """Return whether a token's inputs to a recurrence are as large as its state, as in Mamba 1.

    Its decay has an element for each channel and state. In Mamba 2 and later, it has one per head.
    """
    decays = (module.get("A_log") for _, module in model.named_modules())
    return any(one is not None and sum(size > 1 for size in one.shape) > 1 for one in decays)


def _heads(model: Any) -> int:
    """Return the number of query heads of a layer, at most.

    Models name it differently, some only in a part of the model or in its attention.
    """
    found = [
        getattr(holder, name, None)
        for _, module in model.named_modules()
        for holder in (module, getattr(module, "args", None), getattr(module, "config", None))
        for name in _HEADS
    ]
    return max((one for one in found if isinstance(one, int)), default=64)


def _number(scalar: mx.array) -> float:
    return float(scalar.item())  # type: ignore[arg-type]
