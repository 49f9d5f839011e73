"""Ways to quantize keys and values, by name: ``k4v4:hadamard:no-tail``.

A name is a scheme, then options in any order:

    channel                    keys: groups along 64 tokens (kvd's layout and the default)
    token                      keys: groups along the channels
    hadamard                   keys: groups along the channels after a Hadamard rotation
    rotated                    keys: groups along 64 tokens after a Hadamard rotation
    pairs                      keys: groups along 64 tokens after the channels of each pair that
                               RoPE rotates are mixed in equal parts
    even                       keys: each channel is first divided by its mean absolute value, and
                               the queries multiplied by it, so a rotation spreads no outliers
    vchannel, vhadamard, ...   the same layouts for values (default: groups along the channels)
    kg32, vg32                 groups of 32 instead of 64, for keys or for values
    clip                       a group's range is cut if that lowers the mean square error
    refit                      scales and biases are fit to the codes by least squares
    kclip, vclip, ...          the same for keys or values alone
    sinkN                      the first N tokens stay dense
    head8                      the first page of a row has at least 8 bits
    fineN                      keys of layer N, counted from 0, have 8 bits
    by-k3v3-k8v4-...           the bits of each layer, in order
    onlyN                      only layer N, counted from 0, is quantized
    no-tail                    a page is sealed as soon as it is full
    half                       scales and biases in float16, as on a GPU, instead of float32
    via8                       quantized to 8 bits first, like pages that are stepped down
    mlx-lm                     mlx-lm's own `QuantizedKVCache` in groups of 64; the only option
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx

PAGE = 64
CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Shares of a group's range that ``clip`` tries."""

LAYOUTS = ("channel", "token", "hadamard", "rotated", "pairs")


@dataclass(frozen=True)
class Side:
    """How keys, or values, are stored."""

    bits: int
    layout: str
    group: int = 64
    clip: bool = False
    refit: bool = False
    half: bool = False
    via8: bool = False

    @property
    def bits_per_element(self) -> float:
        """Bits of an element, with its share of the group's 16-bit scale and 16-bit bias."""
        return 16.0 if self.bits == 16 else self.bits + 32 / self.group

    def __call__(self, dense: mx.array) -> mx.array:
        """Quantize and dequantize whole pages, ``[..., tokens, dim]``; lazy."""
        if self.bits == 16:
            return dense
        if self.via8 and self.bits < 8:
            dense = replace(self, bits=8)(dense)
        if self.layout == "channel":
            *lead, tokens, dim = dense.shape
            pages = dense.reshape(*lead, tokens // PAGE, PAGE, dim).swapaxes(-1, -2)
            return self._through(pages).swapaxes(-1, -2).reshape(dense.shape)
        if self.layout in {"hadamard", "rotated", "pairs"}:
            make = _pairs if self.layout == "pairs" else _hadamard
            rotation = make(dense.shape[-1]).astype(dense.dtype)
            straight = replace(self, layout="token" if self.layout == "hadamard" else "channel")
            return straight(dense @ rotation) @ rotation.T
        return self._through(dense)

    def _through(self, x: mx.array) -> mx.array:
        """Quantize along the last axis, and dequantize."""
        dtype = x.dtype
        if self.half:
            x = x.astype(mx.float16)
        if self.clip:
            x = self._clipped(x)
        words, scales, biases = mx.quantize(x, group_size=self.group, bits=self.bits)
        if self.refit:
            scales, biases = self._refit(x, words, scales, biases)
        return self._back(words, scales, biases).astype(dtype)

    def _back(self, words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(words, scales, biases, group_size=self.group, bits=self.bits)

    def _clipped(self, x: mx.array) -> mx.array:
        """Clamp every group to the part of its range that is stored with the least error."""
        groups = x.reshape(*x.shape[:-1], -1, self.group)
        low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
        middle, reach = (low + high) / 2, (high - low) / 2
        best = least = None
        for cut in CUTS:
            tried = mx.clip(groups, middle - cut * reach, middle + cut * reach)
            stored = mx.quantize(tried.reshape(x.shape), group_size=self.group, bits=self.bits)
            off = self._back(*stored).reshape(groups.shape) - groups
            error = mx.square(off.astype(mx.float32)).sum(axis=-1, keepdims=True)
            if best is None or least is None:
                best, least = tried, error
            else:
                best, least = mx.where(error < least, tried, best), mx.minimum(error, least)
        assert best is not None
        return best.reshape(x.shape)

    def _refit(
        self, x: mx.array, words: mx.array, scales: mx.array, biases: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the scales and biases with the least square error for the given codes."""
        ones, zeros = mx.ones_like(scales), mx.zeros_like(biases)
        codes = self._back(words, ones, zeros).reshape(*x.shape[:-1], -1, self.group)
        codes, groups = codes.astype(mx.float32), x.reshape(codes.shape).astype(mx.float32)
        code_mean, mean = codes.mean(axis=-1), groups.mean(axis=-1)
        centred = codes - code_mean[..., None]
        spread = mx.square(centred).sum(axis=-1)
        slope = (centred * groups).sum(axis=-1) / mx.maximum(spread, 1e-12)
        slope = mx.where(spread > 0, slope, scales.astype(mx.float32))
        bias = mean - slope * code_mean
        return slope.astype(scales.dtype), bias.astype(biases.dtype)


@functools.cache
def _hadamard(dim: int) -> mx.array:
    """Return the orthonormal Hadamard matrix: a matrix product with it runs on every device."""
    with mx.stream(mx.cpu):
        matrix = mx.hadamard_transform(mx.eye(dim))
        mx.eval(matrix)
    return matrix


@functools.cache
def _pairs(dim: int) -> mx.array:
    """Return the matrix that mixes channels ``i`` and ``i + dim / 2`` in equal parts."""
    with mx.stream(mx.cpu):
        identity = mx.eye(dim)
        matrix = (identity + mx.roll(identity, dim // 2, axis=0)) * math.sqrt(0.5)
        # The second half of the diagonal is negative: a reflection, which spreads a pair alike.
        matrix = mx.where((identity > 0) & (mx.arange(dim) >= dim // 2), -matrix, matrix)
        mx.eval(matrix)
    return matrix


@dataclass(frozen=True)
class Recipe:
    """One way to store the cache."""

    name: str
    keys: Side
    values: Side
    tail: bool = True
    sinks: int = 0
    """Number of first tokens that stay dense; a multiple of the page size."""
    head8: bool = False
    """Whether a row's first page is stored at 8 bits."""
    only: int | None = None
    """Index of the only layer that is quantized; None if all are."""
    fine: int | None = None
    """Index of the layer whose keys have 8 bits."""
    layers: tuple[tuple[int, int], ...] = ()
    """Bits of keys and values by layer; empty: those of ``keys`` and ``values`` in all."""
    even: bool = False
    """Whether key channels are first divided by their mean absolute values."""
    mlx_lm: bool = False
    """Whether mlx-lm's own cache stores all tokens; then keys and values have the same bits."""

    def at(self, layer: int) -> Recipe | None:
        """Return the recipe of a layer; None if the layer stays dense."""
        if self.only not in {None, layer}:
            return None
        if self.fine == layer:
            return replace(self, keys=replace(self.keys, bits=8))
        if self.layers:
            keys, values = self.layers[layer]
            sides = replace(self.keys, bits=keys), replace(self.values, bits=values)
            return replace(self, keys=sides[0], values=sides[1])
        return self

    def sealed(self, before: int) -> int:
        """Return how many first tokens are sealed, or sinks, in a pass after ``before`` tokens.

        With a tail, a decode step seals a page if 64 tokens, including the step's own, follow it.
        Without a tail, a page is sealed in the first pass that finds it full. kvd's prefill does
        not count the chunk's own tokens, but the result is the same: it could differ only for a
        chunk that begins on a page's last token, and no chunk does.
        """
        if self.tail:
            return PAGE * max(0, (before + 1) // PAGE - 1)
        return before // PAGE * PAGE

    def bytes_to_dense(self, length: int, layers: int) -> float:
        """Return the bytes of a row's keys and values, relative to 16 bits for every element."""
        stored = [self.at(layer) for layer in range(layers)]
        return sum(one.bits(length) if one else 32.0 for one in stored) / (32 * layers)

    def bits(self, length: int) -> float:
        """Return the mean bits of a key element plus a value element in one layer."""
        head = self._head_sides() if self.head8 else (self.keys, self.values)
        parts = [
            (self.sinks, 32.0),
            (PAGE, sum(side.bits_per_element for side in head)),
            (length - self.sinks - PAGE, self.keys.bits_per_element + self.values.bits_per_element),
        ]
        return sum(tokens * bits for tokens, bits in parts) / length

    def stored(self, keys: mx.array, values: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """Quantize and dequantize whole pages, ``[..., tokens, dim]`` from token ``start`` on."""
        if not (self.head8 and start == 0):
            return self.keys(keys), self.values(values)
        head, rest = self._head_sides(), (self.keys, self.values)
        k, v = (
            mx.concatenate([first(x[..., :PAGE, :]), later(x[..., PAGE:, :])], axis=-2)
            if x.shape[-2] > PAGE
            else first(x)
            for x, first, later in zip((keys, values), head, rest, strict=True)
        )
        return k, v

    def _head_sides(self) -> tuple[Side, Side]:
        return (
            replace(self.keys, bits=max(8, self.keys.bits)),
            replace(self.values, bits=max(8, self.values.bits)),
        )


@dataclass
class _Draft:
    keys: dict[str, object] = field(default_factory=lambda: {"layout": "channel"})
    values: dict[str, object] = field(default_factory=lambda: {"layout": "token"})
    row: dict[str, object] = field(default_factory=dict)


def _both(setting: str) -> Callable[[_Draft], None]:
    def apply(draft: _Draft) -> None:
        draft.keys[setting] = draft.values[setting] = True

    return apply


def _one(side: str, setting: str, value: object) -> Callable[[_Draft], None]:
    return lambda draft: getattr(draft, side).update({setting: value})


_OPTIONS: dict[str, Callable[[_Draft], None]] = {
    **{layout: _one("keys", "layout", layout) for layout in LAYOUTS},
    **{f"v{layout}": _one("values", "layout", layout) for layout in LAYOUTS},
    **{name: _both(name) for name in ("clip", "refit", "half", "via8")},
    **{
        letter + name: _one(side, name, value=True)
        for letter, side in (("k", "keys"), ("v", "values"))
        for name in ("clip", "refit", "half", "via8")
    },
    "kg32": _one("keys", "group", 32),
    "vg32": _one("values", "group", 32),
    "no-tail": _one("row", "tail", value=False),
    "head8": _one("row", "head8", value=True),
    "even": _one("row", "even", value=True),
    "mlx-lm": _one("row", "mlx_lm", value=True),
}


def parse(name: str) -> Recipe:
    """Return the recipe with this name. Raises ``ValueError`` if the name is invalid."""
    scheme, *options = name.split(":")
    bits = re.fullmatch(r"k(\d+)v(\d+)", scheme)
    if bits is None:
        raise ValueError(f"a recipe begins with a scheme such as k8v4, not {scheme!r}")
    draft = _Draft()
    for option in options:
        if sinks := re.fullmatch(r"sink(\d+)", option):
            if int(sinks[1]) % PAGE:
                raise ValueError(f"sinks are whole pages of {PAGE} tokens, not {sinks[1]}")
            draft.row["sinks"] = int(sinks[1])
        elif option.startswith("by-"):
            bits_by_layer = re.findall(r"-k(\d+)v(\d+)", option)
            draft.row["layers"] = tuple((int(k), int(v)) for k, v in bits_by_layer)
        elif layer := re.fullmatch(r"(only|fine)(\d+)", option):
            draft.row[layer[1]] = int(layer[2])
        elif option in _OPTIONS:
            _OPTIONS[option](draft)
        else:
            raise ValueError(
                f"no option {option!r}; "
                f"there are {', '.join(_OPTIONS)}, sinkN, fineN, onlyN, by-..."
            )
    keys = Side(int(bits[1]), **draft.keys)  # type: ignore[arg-type]
    values = Side(int(bits[2]), **draft.values)  # type: ignore[arg-type]
    if draft.row.get("mlx_lm") and (len(options) > 1 or keys.bits != values.bits):
        raise ValueError("mlx-lm's cache has the same bits for keys and values, and no options")
    return Recipe(name, keys, values, **draft.row)  # type: ignore[arg-type]
