"""The two decode loops behind one interface: kvd's (`Ours`) and mlx-lm's (`Theirs`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from bench.gpu.graph import primitives
from kvd.worker.sampling import direct_draws
from kvd.worker.sampling.row import RowSettings
from kvd.worker.sampling.sampler import Sampler, SamplerOutput
from kvd.worker.serving.runner import Row, Runner
from protocol.types import Sampling

WARM_UP = 72
"""Untimed steps before the timed ones: enough to include a flush, which compiles its kernels the
first time."""


@dataclass
class Steps:
    """Seconds of each decode step."""

    wall: list[float] = field(default_factory=list)
    """Seconds from reading one step's tokens to reading the next step's."""
    build: list[float] = field(default_factory=list)
    """Host seconds to build the graph: until logits and tokens exist as lazy arrays."""
    launch: list[float] = field(default_factory=list)
    """Host seconds that `async_eval` of the graph takes."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the thread for build and launch; other processes cannot lengthen them."""
    flushes: int = 0


class Loop(Protocol):
    """A batch of rows that decode greedily."""

    name: str

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """Prefill the prompts; return when all rows decode."""

    def decode(self, steps: int) -> Steps:
        """Decode ``steps`` tokens of every row."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rows' keys and values, as the loop counts them."""

    def close(self) -> None:
        """Drop the rows."""


class Ours:
    """The engine's loop: step n+1 is launched before the tokens of step n are read."""

    def __init__(self, runner: Runner, vocabulary: int, chunk: int) -> None:
        self.name = f"kvd {runner.cache.scheme.name}"
        direct_draws.prepare(vocabulary, mx.bfloat16, None)
        self._sampler = Sampler(vocabulary)
        self._runner = runner
        self._chunk = chunk
        self._rows: list[Row] = []
        self._tokens = mx.array([], mx.int32)
        self._flight: SamplerOutput | None = None

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """Prefill row by row in chunks, as the engine does; then decode each row's first token."""
        for prompt in prompts:
            row = self._runner.cache.new_row()
            for start in range(0, len(prompt) - 1, self._chunk):
                self._runner.prefill(row, prompt[start : min(start + self._chunk, len(prompt) - 1)])
            self._sampler.add(len(self._rows), RowSettings(Sampling(temperature=0.0)), prompt)
            self._rows.append(row)
        self._tokens = mx.array([prompt[-1] for prompt in prompts], mx.int32)
        self._launch(Steps())
        self._read()

    def decode(self, steps: int) -> Steps:
        """Decode; each step is launched before the previous step's tokens are read."""
        seen = Steps()
        start = time.perf_counter()
        for _ in range(steps):
            landed = self._flight
            self._launch(seen)
            if landed is not None:
                landed.read()
            now = time.perf_counter()
            seen.wall.append(now - start)
            start = now
        return seen

    def decode_idle(self, steps: int) -> Steps:
        """Decode, with the device idle before each step, so that launches do not wait for it."""
        seen = Steps()
        for _ in range(steps):
            self._read()
            start = time.perf_counter()
            self._launch(seen)
            self._read()
            seen.wall.append(time.perf_counter() - start)
        return seen

    def count(self) -> Counter[str]:
        """Decode a step; return how often each primitive is in its graph."""
        self._flush(Steps())
        self._read()
        draw = self._build()
        counts = primitives([*draw.arrays(), *self._runner.cache.arrays()])
        self._flight, self._tokens = draw, draw.tokens
        self._read()
        return counts

    def _flush(self, seen: Steps) -> None:
        cache = self._runner.cache
        if cache.needs_flush(self._rows):
            self._read()
            cache.flush()
            seen.flushes += 1

    def _build(self) -> SamplerOutput:
        logits = self._runner.decode(self._rows, self._tokens)
        places = [row.length for row in self._rows]
        return self._sampler.draw(logits, range(len(self._rows)), places)

    def _launch(self, seen: Steps) -> None:
        cache = self._runner.cache
        self._flush(seen)
        start, cpu = time.perf_counter(), time.thread_time()
        draw = self._build()
        built = time.perf_counter()
        mx.async_eval(draw.arrays(), cache.arrays())  # type: ignore[no-untyped-call]
        seen.build.append(built - start)
        seen.launch.append(time.perf_counter() - built)
        seen.cpu.append(time.thread_time() - cpu)
        self._flight, self._tokens = draw, draw.tokens

    def _read(self) -> None:
        if self._flight is not None:
            mx.eval(self._flight.arrays(), self._runner.cache.arrays())

    @property
    def tokens(self) -> list[int]:
        """The newest token of every row."""
        found: list[int] = self._tokens.tolist()  # type: ignore[assignment]
        return found

    @property
    def kv_bytes(self) -> int:
        """Bytes of pages in use and of tails."""
        cache = self._runner.cache
        return int(cache.usage.used_bytes + cache.usage.tails_bytes)

    def close(self) -> None:
        """Free the rows and their pools."""
        self._read()
        self._flight = None
        for key, row in enumerate(self._rows):
            self._sampler.remove(key)
            self._runner.cache.free(row)
        self._rows = []
        self._runner.cache.shrink()
        mx.clear_cache()


class Theirs:
    """`mlx_lm.generate.BatchGenerator`, used as in mlx_lm.server."""

    name = "mlx-lm BatchGenerator"

    def __init__(self, model: Any, longest: int) -> None:
        self._generator: Any = BatchGenerator(model, max_tokens=longest)
        self._rows = 0
        self.first_tokens: list[int] = []
        """First new token of every row."""

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """Insert all prompts at once; the generator prefills them together."""
        self._rows = len(prompts)
        self._generator.insert(list(prompts))
        while len(self.first_tokens) < self._rows:
            self.first_tokens = [one.token for one in self._generator.next_generated()]

    def decode(self, steps: int) -> Steps:
        """Decode; only wall times are known, because the generator builds, launches and waits."""
        seen = Steps()
        start = time.perf_counter()
        for _ in range(steps):
            if len(self._generator.next_generated()) != self._rows:
                raise RuntimeError("a row of BatchGenerator ended early")
            now = time.perf_counter()
            seen.wall.append(now - start)
            start = now
        return seen

    @property
    def kv_bytes(self) -> int:
        """Bytes that the generator reports."""
        return int(self._generator.prompt_cache_nbytes)

    def close(self) -> None:
        """Drop the generator and its caches."""
        mx.synchronize(self._generator.stream)
        self._generator.close()
        self._generator = None
        mx.clear_cache()
