"""Ways to quantize keys and values, by name: ``k4v4:hadamard:no-tail``.

A name is a scheme, then options in any order:

    channel, token, hadamard   keys: groups along 64 tokens (the product's layout; no need to say),
                               along the channels, along the channels after a Hadamard rotation
    rotated                    keys: groups along 64 tokens after a Hadamard rotation
    even                       keys: every channel is first divided by its mean size, which the
                               queries take over; so that a rotation does not spread outliers
    vchannel, vhadamard        the same for values; without, per token
    kg32, vg32                 groups of 32 instead of 64, of keys or of values
    clip, refit                other scales than MLX's: the range is cut where that lowers the mean
                               square error; scale and bias fit to the codes by least squares
    kclip, vclip, ...          the same for one side
    sinkN                      the first N tokens stay dense
    head8                      the first page of a row at 8 bits, whatever the scheme
    fineN                      keys of layer N at 8 bits, counted from 0
    onlyN                      only layer N is quantized
    no-tail                    a page is sealed as soon as it is full
    half                       scales and biases in float16, as on a GPU, instead of float32
    via8                       first at 8 bits, then again: pages that were stepped down
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx

PAGE = 64
CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Parts of the range that a search for the best clip tries."""

LAYOUTS = ("channel", "token", "hadamard", "rotated")


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
        """With a 16-bit scale and bias for each group."""
        return 16.0 if self.bits == 16 else self.bits + 32 / self.group

    def __call__(self, dense: mx.array) -> mx.array:
        """Return what ``[..., tokens, dim]``, whole pages, looks like after storage; lazy."""
        if self.bits == 16:
            return dense
        if self.via8 and self.bits < 8:
            dense = replace(self, bits=8)(dense)
        if self.layout == "channel":
            *lead, tokens, dim = dense.shape
            pages = dense.reshape(*lead, tokens // PAGE, PAGE, dim).swapaxes(-1, -2)
            return self._through(pages).swapaxes(-1, -2).reshape(dense.shape)
        if self.layout in {"hadamard", "rotated"}:
            rotation = _hadamard(dense.shape[-1]).astype(dense.dtype)
            straight = replace(self, layout="token" if self.layout == "hadamard" else "channel")
            return straight(dense @ rotation) @ rotation.T
        return self._through(dense)

    def _through(self, x: mx.array) -> mx.array:
        """Quantize along the last axis and back."""
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
        """Return the scales and biases with the least square error for the codes as they are."""
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
    """Return the orthonormal Hadamard matrix; a product with it runs on every device."""
    with mx.stream(mx.cpu):
        matrix = mx.hadamard_transform(mx.eye(dim))
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
    """First tokens that stay dense; whole pages."""
    head8: bool = False
    """Whether a row's first page is stored at 8 bits."""
    only: int | None = None
    """The one layer that is quantized; None: all are."""
    fine: int | None = None
    """The layer whose keys have 8 bits."""
    even: bool = False
    """Whether key channels are brought to one size before everything else."""

    def at(self, layer: int) -> Recipe | None:
        """Return the recipe of a layer; None: it stays dense."""
        if self.only not in {None, layer}:
            return None
        if self.fine == layer:
            return replace(self, keys=replace(self.keys, bits=8))
        return self

    def sealed(self, before: int) -> int:
        """Return how many tokens are quantized (or sinks) when a pass begins after ``before``.

        A page is sealed in the step that makes the row two pages longer than its beginning;
        without the tail, once it is full. A chunk of a prompt seals for the length before it; the
        two agree unless a chunk begins on a page's last token, which none does.
        """
        if self.tail:
            return PAGE * max(0, (before + 1) // PAGE - 1)
        return before // PAGE * PAGE

    def bytes_to_dense(self, length: int, layers: int) -> float:
        """Return the bytes of a row's pages as a share of what they take in 16 bits, sinks too."""
        stored = [self.at(layer) for layer in range(layers)]
        return sum(one.bits(length) if one else 32.0 for one in stored) / (32 * layers)

    def bits(self, length: int) -> float:
        """Return the bits of an element of keys and one of values in one layer."""
        head = self._head_sides() if self.head8 else (self.keys, self.values)
        parts = [
            (self.sinks, 32.0),
            (PAGE, sum(side.bits_per_element for side in head)),
            (length - self.sinks - PAGE, self.keys.bits_per_element + self.values.bits_per_element),
        ]
        return sum(tokens * bits for tokens, bits in parts) / length

    def stored(self, keys: mx.array, values: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """Return whole pages, ``[..., tokens, dim]`` from token ``start`` on, after storage."""
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
}


def parse(name: str) -> Recipe:
    """Read a name; ``ValueError`` says what is wrong with it."""
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
        elif layer := re.fullmatch(r"(only|fine)(\d+)", option):
            draft.row[layer[1]] = int(layer[2])
        elif option in _OPTIONS:
            _OPTIONS[option](draft)
        else:
            raise ValueError(
                f"no option {option!r}; there are {', '.join(_OPTIONS)}, sinkN, fineN, onlyN"
            )
    keys = Side(int(bits[1]), **draft.keys)  # type: ignore[arg-type]
    values = Side(int(bits[2]), **draft.values)  # type: ignore[arg-type]
    return Recipe(name, keys, values, **draft.row)  # type: ignore[arg-type]
