"""Checks decode attention over pages of all schemes, in plain operations and in kernels.

Both results are compared with dense attention in float64 over the dequantized pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from msgspec.structs import replace as replace_fields
from numpy.typing import NDArray

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import DecodeHandle, make_caches
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore
from kvd.worker.selftest.outcome import Outcome, outcome_of
from kvd.worker.serving import kernel_choice
from kvd.worker.serving.kernel_check import has_kernels_for

BOUNDS = {mx.float32: 2e-5, mx.float16: 8e-3, mx.bfloat16: 4e-2}
"""Limits of the largest difference, relative to the largest value; outputs are rounded to the
dtype."""
_CHUNK = 256
_CALLS = 20
_KEYS = 4096
"""Keys of each of the four rows whose attention is timed."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A shape of attention to check: rows over the pages of one layer."""

    dtype: mx.Dtype = mx.float32
    dim: int = 64
    v_dim: int | None = None
    kv_heads: int = 2
    repeats: int = 2
    schemes: tuple[str, ...] = ("k8v8", "k8v4", "k4v4")
    """The pages of each row take these schemes in turn."""
    lengths: tuple[int, ...] = (300, 5, 64, 777)
    kind: Kind = FULL
    sinks: bool = False

    @property
    def name(self) -> str:
        parts = [str(self.dtype).rpartition(".")[2], f"{self.dim}x{self.v_dim or self.dim}"]
        parts += [f"{self.kv_heads}x{self.repeats} heads", "+".join(self.schemes)]
        parts += [str(self.kind)] if self.kind != FULL else []
        return ", ".join([*parts, "sinks"] if self.sinks else parts)


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield every kind of shape that models have; with ``quick``, only some."""
    yield Case()
    yield Case(mx.float16, dim=128, repeats=4)
    yield Case(mx.bfloat16, dim=128, kv_heads=1, repeats=8, kind=Kind(window=200))
    if quick:
        return
    for dtype in BOUNDS:
        for dim in (64, 80, 96, 128, 256):
            for repeats in (1, 4, 7, 16):
                yield Case(dtype, dim=dim, repeats=repeats)
        for schemes in ("k16v16", "k8v8", "k4v4", "k3v4", "k2v2", "k6v5"):
            yield Case(dtype, dim=128, schemes=(schemes,), lengths=(2, 500))
        yield Case(dtype, dim=192, v_dim=128, repeats=4)
        yield Case(dtype, sinks=True, repeats=4)
        yield Case(dtype, kind=Kind(window=300, keep=70), lengths=(900, 30))
        yield Case(dtype, kind=Kind(chunk=128), lengths=(300, 65))
        yield Case(dtype, dim=128, kv_heads=4, repeats=4, lengths=(8200, 3, 127))


class Step:
    """A case's store, and a decode step over it."""

    def __init__(self, case: Case, kernels: FusedBackend | None) -> None:
        self.case = case
        self._random = np.random.default_rng(7)
        self.geometry = LayerGeometry(
            case.kv_heads, case.dim, case.v_dim or case.dim, case.dtype.size
        )
        schemes = [Scheme.parse(name) for name in case.schemes]
        self.store = KVStore([self.geometry], schemes, case.dtype, kind=case.kind)
        self.store.backend = kernels
        (self._cache,) = make_caches(self.store)
        self.rows = [self._row(length) for length in case.lengths]
        mx.eval(self.store.arrays())
        if self.store.needs_flush(self.rows):
            self.store.flush()
        self.store.begin_decode(self.rows)
        new = [self._noise(1) for _ in self.rows]
        sides = (mx.concatenate([noise[side] for noise in new]) for side in (0, 1))
        handle, _ = self._cache.update_and_fetch(*sides)
        assert isinstance(handle, DecodeHandle)
        self.handle = handle
        heads = case.kv_heads * case.repeats
        self.queries = self._array((len(self.rows), heads, 1, case.dim)) * 2
        self.sinks = self._array((heads,)) if case.sinks else None
        self.scale = case.dim**-0.5
        mx.eval(self.queries, self.store.arrays())

    def _array(self, shape: tuple[int, ...]) -> mx.array:
        return mx.array(self._random.normal(size=shape).astype(np.float32)).astype(self.case.dtype)

    def _noise(self, tokens: int) -> tuple[mx.array, mx.array]:
        heads, k_dim, v_dim = self.geometry.kv_heads, self.geometry.k_dim, self.geometry.v_dim
        return self._array((1, heads, tokens, k_dim)), self._array((1, heads, tokens, v_dim))

    def _row(self, length: int) -> Row:
        row = self.store.new_row()
        for start in range(0, length - 1, _CHUNK):
            count = min(_CHUNK, length - 1 - start)
            self.store.begin_prefill(row, count)
            self._cache.update_and_fetch(*self._noise(count))
            self.store.finish_prefill()
        for level in range(1, len(self.store.schemes)):
            if due := row.pages[level :: len(self.store.schemes)]:
                self.store.pages.convert(0, level, due, [row])
        return row

    def attend(self, *, plain: bool) -> mx.array:
        """Return the attention by plain operations or by the store's backend."""
        handle = self.handle
        if plain:
            handle = replace(handle, step=replace(handle.step, backend=None))
        return decode_attention(self.queries, handle, self.scale, self.sinks)

    def error(self, got: mx.array) -> float:
        """Return the largest difference to dense attention, relative to its largest value."""
        found = _float64(got)
        expected = np.concatenate([self._dense(index) for index in range(len(self.rows))])
        expected = expected.reshape(found.shape)
        if not np.isfinite(found).all():
            return float("inf")
        return float(np.abs(found - expected).max() / np.abs(expected).max())

    def _dense(self, index: int) -> Array:
        row, case = self.rows[index], self.case
        keys, values = map(_float64, self.store.read(row, 0))
        queries = _float64(self.queries[index])[:, 0]
        seen = self._seen(row)
        sinks = None if self.sinks is None else _float64(self.sinks)
        out = []
        for head in range(queries.shape[0]):
            group = head // case.repeats
            scores = keys[group][seen] @ queries[head] * self.scale
            sink = None if sinks is None else sinks[head]
            top = scores.max() if sink is None else max(scores.max(), sink)
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
            out.append(weights @ values[group][seen] / total)
        return np.stack(out)

    def _seen(self, row: Row) -> NDArray[np.bool_]:
        positions = np.array(self.store.positions(row))
        newest, kind = row.length - 1, self.case.kind
        if kind.chunk:
            return positions >= newest // kind.chunk * kind.chunk
        if kind.window:
            return (positions > newest - (kind.window - kind.keep)) | (positions < kind.keep)
        return positions >= 0


def _float64(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32), np.float64)


def reference(*, quick: bool) -> Outcome:
    steps = [(Step(case, None), True) for case in cases(quick=quick)]
    outcome = _compare("attention, plain", _worst(steps), len(steps))
    return replace_fields(outcome, numbers={"path": "plain operations", **outcome.numbers})


def kernels(*, quick: bool) -> Outcome:
    """Compare kernels with dense attention, and their time with that of plain operations."""
    name = "attention, kernels"
    backend = kernel_choice.find_kernels()
    if backend is None:
        return Outcome(name, "skip", "kernels are for Metal and CUDA")
    steps = [
        (step, False)
        for step in (Step(case, backend) for case in cases(quick=quick))
        if has_kernels_for(step.geometry)
    ]
    before = backend.kernels.launches
    worst = _worst(steps)
    launches = backend.kernels.launches - before
    if not launches:
        return Outcome(name, "fail", "no kernel was launched", "attach the report to an issue")
    outcome = _compare(name, worst, len(steps))
    big = Step(Case(mx.bfloat16, dim=128, kv_heads=8, repeats=2, schemes=("k4v4",),
                    lengths=(_KEYS,) * 4), backend)  # fmt: skip
    fused, plain = (_milliseconds(big, plain=plain) for plain in (False, True))
    numbers = outcome.numbers | {
        "path": f"kernels of {'Metal' if mx.metal.is_available() else 'CUDA'}",
        "kernel_ms": fused,
        "plain_ms": plain,
        "launches": launches,
    }
    text = f"4 rows of {_KEYS} keys take {fused:.3f} ms, plain operations {plain:.3f} ms"
    return replace_fields(outcome, observed=f"{outcome.observed}; {text}", numbers=numbers)


def _worst(steps: Sequence[tuple[Step, bool]]) -> dict[mx.Dtype, tuple[float, str]]:
    worst: dict[mx.Dtype, tuple[float, str]] = {}
    for step, plain in steps:
        error = step.error(step.attend(plain=plain))
        if error >= worst.get(step.case.dtype, (-1.0, ""))[0] or np.isnan(error):
            worst[step.case.dtype] = (error, step.case.name)
    return worst


def _compare(name: str, worst: dict[mx.Dtype, tuple[float, str]], count: int) -> Outcome:
    right = all(error <= BOUNDS[dtype] for dtype, (error, _) in worst.items())
    parts = [f"{count} shapes against float64"]
    numbers: dict[str, float] = {"shapes": count}
    for dtype, (error, case) in worst.items():
        short = str(dtype).rpartition(".")[2]
        parts.append(f"{short} off by {error:.1g}")
        numbers |= {f"{short}_error": error, f"{short}_bound": BOUNDS[dtype]}
        if not error <= BOUNDS[dtype]:
            parts.append(f"beyond {BOUNDS[dtype]:.1g} ({case})")
    return outcome_of(name, "; ".join(parts), right=right, **numbers)


def _milliseconds(step: Step, *, plain: bool) -> float:
    mx.eval(step.attend(plain=plain))
    start = time.perf_counter()
    for _ in range(_CALLS):
        mx.eval(step.attend(plain=plain))
    return (time.perf_counter() - start) / _CALLS * 1e3
