"""Makes kvd take its CUDA path on the CPU, and names the phases of a load."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from bench.jit.recorder import Recorder
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.language import CUDA
from kvd.worker.cache import pool
from kvd.worker.gpu import products
from kvd.worker.sampling import direct_draws, sampler
from kvd.worker.serving import (
    bit_probe,
    check_key,
    kernel_check,
    kernel_choice,
    kernel_timing,
    model_files,
    probe,
    selfcheck,
)
from kvd.worker.serving.runner import Runner
from tests.worker.attention.stand_in import StandIn
from tests.worker.gpu import plain_products

Opaque = Callable[[Callable[..., Any]], Callable[..., Any]]

PREFILL = ("spread", "pack", "unpack", "attend", "put_tails")
"""Kernels of prefill passes."""
PROBE = "probe of layers"
"""The phase of the probe, which a load leaves to idle steps."""
PHASES: list[tuple[Any, str, str]] = [
    (model_files, "read_weights", "weights"),
    (probe, "find_layout", "layout"),
    (bit_probe.BitProbe, "advance", PROBE),
    (selfcheck, "against_own_caches", "own caches"),
    (selfcheck, "against_dequantized", "pages"),
    (kernel_check, "check_kernels", "kernels"),
    (kernel_timing, "compare", "timing"),
    (Runner, "compile", "compiled steps"),
    (Runner, "pack", "packed prefill"),
    (Runner, "split_head", "split head"),
    (sampler, "compile_modules", "sampling"),
    (pool, "compile_modules", "writes of pages"),
]
"""Functions of a load, and the names of their phases."""


class Kernels(StandIn):
    """kvd's kernels, whose own operations are ignored."""

    def __init__(self, opaque: Opaque) -> None:
        super().__init__()
        for name in ("append", "rotate", "decode_attention", *PREFILL):
            setattr(self, name, opaque(getattr(self, name)))


@contextmanager
def as_cuda(opaque: Opaque) -> Iterator[None]:
    """Let kvd believe that its device is CUDA, in this context."""
    gpu = mx.Device(mx.gpu)
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(mx, "default_device", lambda: gpu)
        put(mx.cuda, "is_available", lambda: True)
        stack.enter_context(mock.patch.dict(os.environ, {check_key.VARIABLE: "off"}))
        backend = FusedBackend(Kernels(opaque), CUDA.most_buffers)
        put(direct_draws, "_agrees", lambda *_: False)  # operations draw, as without the kernel
        put(kernel_choice, "find_kernels", lambda: backend)
        # What replaces the kernels is slow; the comparison runs for its operations alone.
        put(kernel_timing, "DENSE_LIMIT", math.inf)
        for name, value in (("KEYS", 256), ("CALLS", 2), ("REPEATS", 1)):
            put(kernel_timing, name, value)
        put(products, "multiply", opaque(plain_products.multiply))
        put(products, "multiply_gated", opaque(plain_products.multiply_gated))
        yield


@contextmanager
def phases(recorder: Recorder) -> Iterator[None]:
    """Record under the name of the phase that runs, in this context."""
    with ExitStack() as stack:
        for owner, name, phase in PHASES:
            inside = _inside(recorder, phase, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, inside))
        yield


def _inside(recorder: Recorder, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The comparisons of the kernels' check are part of that.
        name = "kernels" if "kernels" in recorder.phases and phase == "pages" else phase
        with recorder.phase(name):
            return function(*args, **kwargs)

    return call
