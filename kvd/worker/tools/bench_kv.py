"""Measures cost and error of KV schemes: ``python -m kvd.worker.tools bench_kv``.

Measures one layer of a model's geometry at a time on random keys and values, through kvd's own
pages, pools, attention and step-down, and prints one JSON object. Progress goes to stderr. Only a
model's configuration is read, and only that is downloaded for a Hub id. At most one dense layer
exists at a time: keys and values come in chunks that are generated again from their seed where they
are compared.

Random keys have no outliers, only channels of different size, and random queries attend to
everything. So the errors compare schemes, but are not those of a real model.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.batch import DecodeHandle, make_caches
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.step_down import StepDown
from kvd.worker.cache.store import KVStore
from kvd.worker.serving.model_files import default_dtype, resolve
from kvd.worker.tools.output import Report, print_result, progress
from protocol.errors import InvalidModel, InvalidRequest, UnsupportedModel

CHUNK = 1024
"""Tokens generated, quantized or compared at once."""
REPEATS = 7
_KEYS = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
}
"""Names of options in ``config.json``; the other options have the same name there."""
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class Shape:
    """A model's attention, the same in all layers."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    dtype: str

    def __post_init__(self) -> None:
        for field in ("heads", "kv_heads", "head_dim", "layers"):
            if getattr(self, field) < 1:
                raise InvalidRequest(f"{field} must be at least 1", field=field)
        if self.heads % self.kv_heads:
            raise InvalidRequest(
                f"heads ({self.heads}) must be a multiple of KV heads ({self.kv_heads})",
                field="heads",
            )
        if self.dtype not in _DTYPES:
            raise InvalidRequest(
                f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}", field="dtype"
            )

    @property
    def geometry(self) -> LayerGeometry:
        return LayerGeometry(
            self.kv_heads, self.head_dim, self.head_dim, int(_DTYPES[self.dtype].size)
        )


def shape_of(config: dict[str, Any], **given: Any) -> Shape:
    """Read a model's shape from its ``config.json``; ``given`` values take precedence.

    Raises `UnsupportedModel` if the configuration is not sufficient.
    """
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise UnsupportedModel("text_config in config.json is not an object", field="text_config")
    text = config | nested
    if text.get("kv_lora_rank") and "head_dim" not in given:
        raise UnsupportedModel(
            "this model caches latents instead of heads (MLA); give --heads, --kv-heads 1, "
            "--head-dim and --layers",
            field="kv_lora_rank",
        )

    def number(name: str) -> int | None:
        return given[name] if name in given else _count(text, name)

    heads = number("heads")
    head_dim = number("head_dim")
    if head_dim is None and heads and (hidden := _count(text, "hidden_size")):
        head_dim = hidden // heads
    # MLX emulates half precision on the CPU, so workers run float32 there.
    stored = text.get("torch_dtype") or text.get("dtype")
    dtype = "float32" if default_dtype() is not None else stored
    found: dict[str, Any] = {
        "heads": heads,
        "kv_heads": heads if (kv_heads := number("kv_heads")) is None else kv_heads,
        "head_dim": head_dim,
        "layers": number("layers"),
        "dtype": given.get("dtype", dtype if dtype in list(_DTYPES) else "bfloat16"),
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in found.items() if value is None]
    if missing:
        raise UnsupportedModel(f"the configuration is not sufficient; give {', '.join(missing)}")
    return Shape(**found)


def _count(text: dict[str, Any], name: str) -> int | None:
    key = _KEYS.get(name, name)
    found = text.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        option = "head-dim" if name == "hidden_size" else name.replace("_", "-")
        raise UnsupportedModel(
            f"{key} in config.json is {str(found)[:60]!r}, not one number for all layers; "
            f"give --{option}",
            field=key,
        )
    return found


def read_config(model: str) -> dict[str, Any]:
    file = Path(resolve(model, files=("config.json",))) / "config.json"
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{file} cannot be read: {error}", path=str(file)) from error
    if not isinstance(found, dict):
        raise InvalidModel(f"{file} is not a JSON object", path=str(file))
    return found


class Source:
    """Random keys and values of one layer, in chunks that can be generated again."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape = shape
        self.tokens = tokens
        self._channels = mx.linspace(0.3, 2.0, shape.head_dim)

    def __iter__(self) -> Iterator[tuple[int, mx.array, mx.array]]:
        for start in range(0, self.tokens, CHUNK):
            yield start, *self.chunk(start, min(CHUNK, self.tokens - start))

    def chunk(self, start: int, count: int) -> tuple[mx.array, mx.array]:
        """Return keys and values, ``[1, kv_heads, count, head_dim]`` in the model's dtype."""
        shape = (1, self.shape.kv_heads, count, self.shape.head_dim)
        pair = []
        for key in mx.random.split(mx.random.key(start)):
            dense = mx.random.normal(shape, key=key) * self._channels + 0.2
            pair.append(dense.astype(_DTYPES[self.shape.dtype]))
        mx.eval(pair)
        return pair[0], pair[1]

    def queries(self) -> mx.array:
        shape = (1, self.shape.heads, 1, self.shape.head_dim)
        return mx.random.normal(shape, key=mx.random.key(2**31)).astype(_DTYPES[self.shape.dtype])

    def truth(self, scale: float) -> mx.array:
        """Return the attention output in float32, from exact keys and values, chunk by chunk."""
        shape = self.shape
        q = self.queries().astype(mx.float32).reshape(shape.kv_heads, -1, shape.head_dim) * scale
        top = mx.full((*q.shape[:2], 1), -mx.inf)
        total, output = mx.zeros_like(top), mx.zeros_like(q)
        for _, keys, values in self:
            scores = q @ keys[0].astype(mx.float32).swapaxes(-1, -2)
            higher = mx.maximum(top, scores.max(axis=-1, keepdims=True))
            weights, kept = mx.exp(scores - higher), mx.exp(top - higher)
            total = total * kept + weights.sum(axis=-1, keepdims=True)
            output = output * kept + weights @ values[0].astype(mx.float32)
            top = higher
            mx.eval(top, total, output)
        return (output / total).reshape(1, shape.heads, 1, shape.head_dim)


class Case:
    """One layer's pages at one scheme."""

    def __init__(self, source: Source, scheme: Scheme, lower: Scheme | None) -> None:
        self.source = source
        self.scheme = scheme
        self.lower = lower
        shape = source.shape
        schemes = [scheme, lower] if lower else [scheme]
        self.store = KVStore([shape.geometry], schemes, _DTYPES[shape.dtype])
        self.scale = shape.head_dim**-0.5
        pages = max(0, source.tokens // PAGE_TOKENS - 1)
        self.store.layers[0].pools[0].grow(pages)  # at once, so that no pool is copied
        self.store.pages.allocators[0].grow(pages)
        (self.cache,) = make_caches(self.store)
        self.row, self.quantize_s = self._fill()

    def _fill(self) -> tuple[Row, list[float]]:
        """Prefill all but the last token; return the seconds per page of each chunk."""
        pool, row, seconds = self.store.layers[0].pools[0], self.store.new_row(), []
        for _, keys, values in self.source:
            if count := keys.shape[2] // PAGE_TOKENS:
                pages = [_paged(side, count) for side in (keys, values)]
                mx.eval(pages)
                start = time.perf_counter()
                mx.eval(pool.pack(*pages))
                seconds.append((time.perf_counter() - start) / count)
                del pages
            last = row.length + keys.shape[2] == self.source.tokens
            if prefilled := keys.shape[2] - last:
                self.store.begin_prefill(row, prefilled)
                self.cache.update_and_fetch(keys[:, :, :prefilled], values[:, :, :prefilled])
                self.store.finish_prefill()
        return row, seconds

    def errors(self) -> tuple[float, float]:
        """Return the relative error of the keys and of the values in pages."""
        pool = self.store.layers[0].pools[0]
        wrong, size = [0.0, 0.0], [1e-30, 1e-30]
        done = 0
        for _, *chunk in self.source:
            slots = [page.slot for page in self.row.pages[done : done + CHUNK // PAGE_TOKENS]]
            done += len(slots)
            if not slots:
                continue
            pairs = zip(chunk, pool.read(mx.array(slots)), strict=True)
            for side, (dense, shown) in enumerate(pairs):
                true = _paged(dense, len(slots)).astype(mx.float32)
                wrong[side] += float(mx.square(true - shown.astype(mx.float32)).sum())
                size[side] += float(mx.square(true).sum())
        keys, values = ((a / b) ** 0.5 for a, b in zip(wrong, size, strict=True))
        return keys, values

    def attend(self) -> tuple[mx.array, float]:
        """Decode the last token; return the output, and the median seconds of the attention."""
        chunk, place = divmod(self.source.tokens - 1, CHUNK)
        keys, values = self.source.chunk(chunk * CHUNK, place + 1)
        if self.store.needs_flush([self.row]):
            self.store.flush()
        self.store.begin_decode([self.row])
        handle, _ = self.cache.update_and_fetch(keys[:, :, -1:], values[:, :, -1:])
        assert isinstance(handle, DecodeHandle)
        mx.eval(self.store.arrays())
        queries = self.source.queries()
        return _timed(lambda: decode_attention(queries, handle, self.scale))

    def requantize(self) -> float | None:
        """Step the row down; return the seconds, or None without pages or a lower level."""
        if self.lower is None or not self.row.pages:
            return None
        self.store.flush()
        down = StepDown(self.store, [self.row], 1)
        start = time.perf_counter()
        while not down.over:
            down.advance(1.0, time.perf_counter)
        return time.perf_counter() - start


def _timed(work: Callable[[], mx.array]) -> tuple[mx.array, float]:
    output = work()
    mx.eval(output)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(work())
        seconds.append(time.perf_counter() - start)
    return output, statistics.median(seconds)


def _paged(dense: mx.array, pages: int) -> mx.array:
    """Cut ``[1, heads, tokens, dim]`` into pages, ``[pages, heads, 64, dim]``."""
    _, heads, _, dim = dense.shape
    tokens = dense[0, :, : pages * PAGE_TOKENS]
    return tokens.reshape(heads, pages, PAGE_TOKENS, dim).swapaxes(0, 1)


def _relative(found: mx.array, true: mx.array) -> float:
    difference = mx.square(found.astype(mx.float32) - true).sum()
    return float(mx.sqrt(difference / mx.square(true).sum()))


def _dense(source: Source) -> float:
    """Return the seconds of MLX's own attention over one dense layer."""
    shape = source.shape
    sides = [
        mx.zeros((1, shape.kv_heads, source.tokens, shape.head_dim), _DTYPES[shape.dtype])
        for _ in range(2)
    ]
    for start, *chunk in source:
        for side, new in zip(sides, chunk, strict=True):
            side[:, :, start : start + new.shape[2]] = new
        mx.eval(sides)
    attend = partial(
        mx.fast.scaled_dot_product_attention, source.queries(), *sides, scale=shape.head_dim**-0.5
    )
    return _timed(attend)[1]


def measure(
    shape: Shape, schemes: list[Scheme], lengths: list[int], report: Report
) -> dict[str, Any]:
    """Measure all schemes at all context lengths; times cover all layers together."""
    results = []
    for length in lengths:
        source = Source(shape, length)
        true = source.truth(shape.head_dim**-0.5)
        mx.eval(true)
        mx.clear_cache()
        report(f"dense, {length} tokens")
        dense_s = _dense(source)
        mx.clear_cache()
        for index, scheme in enumerate(schemes):
            report(f"{scheme.name}, {length} tokens")
            lower = next((one for one in schemes[index + 1 :] if one.is_below(scheme)), None)
            results.append(_measure_one(source, scheme, lower, true, dense_s))
            gc.collect()  # a store and its allocators refer to each other
            mx.clear_cache()
    return {
        "shape": {name: getattr(shape, name) for name in Shape.__dataclass_fields__},
        "device": str(mx.default_device()),
        "results": results,
    }


def _measure_one(
    source: Source, scheme: Scheme, lower: Scheme | None, true: mx.array, dense_s: float
) -> dict[str, Any]:
    shape = source.shape

    def ms(layer_s: float) -> float:
        return layer_s * 1e3 * shape.layers

    case = Case(source, scheme, lower)
    keys, values = case.errors()
    output, attend = case.attend()
    pool = case.store.layers[0].pools[0]
    held = sum(array.nbytes for array in pool.arrays()) / max(1, pool.capacity * PAGE_TOKENS)
    pages_per_1k = 1024 / PAGE_TOKENS
    pages = len(case.row.pages)
    requantize = case.requantize()
    result = {
        "scheme": scheme.name,
        "tokens": source.tokens,
        "bytes_per_token": held * shape.layers,
        "share_of_fp16": held / (shape.kv_heads * shape.head_dim * 2 * 2),
        "k_error": keys,
        "v_error": values,
        "output_error": _relative(output, true),
        "quantize_ms_per_1k": None,
        "requantize_to": None,
        "requantize_ms_per_1k": None,
        "attend_ms": ms(attend),
        "dense_attend_ms": ms(dense_s),
    }
    if case.quantize_s:
        result["quantize_ms_per_1k"] = ms(statistics.median(case.quantize_s) * pages_per_1k)
    if requantize is not None and lower:
        result["requantize_to"] = lower.name
        result["requantize_ms_per_1k"] = ms(requantize / pages * pages_per_1k)
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvd.worker.tools bench_kv", description="Measures KV schemes."
    )
    parser.add_argument("model", nargs="?")
    for name in ("heads", "kv-heads", "head-dim", "layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--schemes", required=True, help="comma-separated")
    parser.add_argument("--lengths", required=True, help="comma-separated")
    return parser.parse_args()


def _tokens(text: str) -> int:
    if re.fullmatch("[0-9]{1,9}", text) is None:
        raise InvalidRequest(
            f"lengths: {text[:40]!r} is not a context length; give tokens, separated by commas",
            field="lengths",
        )
    tokens = int(text)
    if tokens < 2 * PAGE_TOKENS:
        raise InvalidRequest(
            f"lengths: {text} is too short; below {2 * PAGE_TOKENS} tokens no page is full",
            field="lengths",
        )
    return tokens


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("heads", "kv_heads", "head_dim", "layers", "dtype")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    config = read_config(arguments.model) if arguments.model else {}
    shape = shape_of(config, **given)
    try:
        schemes = [Scheme.parse(name) for name in arguments.schemes.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"schemes: {error}", field="schemes") from error
    lengths = [_tokens(text) for text in arguments.lengths.split(",")]
    report = progress(len(lengths) * (1 + len(schemes)))
    return {"model": arguments.model} | measure(shape, schemes, lengths, report)


def main() -> None:
    print_result(lambda: _run(_arguments()))
