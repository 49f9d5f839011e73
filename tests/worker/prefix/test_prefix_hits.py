"""Logits of real models have the same bits after a hit in the prefix tree as without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.step_down import ModelStepDown
from kvd.worker.prefix.tree import PrefixTree
from kvd.worker.serving import probe, seam
from kvd.worker.serving.runner import Row, Runner
from tests.worker import shallow
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.prefix.invariants import check_tree

pytestmark = pytest.mark.mlx

CHUNK, EVERY = 128, 256
DECODED = 3
ROOM = 1 << 30
TIGHT = 6
"""About how many checkpoints fit under the tight cap."""


@dataclass
class PromptServer:
    """Serves prompts one after the other, as an engine does; some rows stay in the cache."""

    runner: Runner
    tree: PrefixTree | None
    staying: list[Row] = field(default_factory=list)

    def serve(self, prompt: list[int], *, stays: bool = False) -> tuple[np.ndarray, list[int]]:
        """Return the logits after a prompt, and the tokens drawn greedily from them."""
        cache, start, boundaries = self.runner.cache, 0, set()
        row = None
        if self.tree is not None:
            hit = self.tree.match(prompt)
            start = hit.tokens
            row = cache.restore(hit.snapshot) if hit.tokens else None
            boundaries = self.tree.boundaries(prompt)
        row = row or cache.new_row()
        while start < len(prompt) - 1:
            end = min((start // CHUNK + 1) * CHUNK, len(prompt) - 1)
            self.runner.prefill(row, prompt[start:end])
            if self.tree is not None and end in boundaries:
                self.tree.insert(prompt[:end], "", row)
            start = end
        answer = self._decode(row, prompt[-1])
        if stays:
            self.staying.append(row)
        else:
            cache.free(row)
        return answer

    def _decode(self, row: Row, token: int) -> tuple[np.ndarray, list[int]]:
        cache, logits, tokens = self.runner.cache, [], [token]
        for _ in range(DECODED):
            if cache.needs_flush([row]):
                cache.flush()
            out = self.runner.decode([row], mx.array(tokens[-1:], mx.int32)).astype(mx.float32)
            mx.eval(out, cache.arrays())
            assert mx.isfinite(out).all().item()
            logits.append(np.array(out[0]))
            tokens.append(int(mx.argmax(out[0]).item()))
        return np.stack(logits), tokens[1:]

    def leave(self) -> None:
        for row in self.staying:
            self.runner.cache.free(row)
        self.staying = []


def demo_runner(scheme: str) -> Runner:
    seam.install()
    model = mlx_lm.load(shallow.path())[0]
    model.set_dtype(mx.float32)
    settings = CacheSettings(schemes=(Scheme.parse(scheme),))
    return Runner(model, ModelCache(probe.find_layout(model), settings))


def tiny_runner(name: str, **settings: Any) -> Runner:
    model, _ = build(name)
    schemes = (Scheme(8, 4), Scheme(4, 4))
    return Runner(
        model, ModelCache(probe.find_layout(model), CacheSettings(schemes=schemes, **settings))
    )


def own_runner() -> Runner:
    model, _ = build("qwen3")
    return Runner(model, MlxLmCache(model_caches(model), fixed_bytes=0, token_bytes=1))


def model_caches(model: Any) -> Callable[[], list[Any]]:
    return lambda: mlx_lm.models.cache.make_prompt_cache(model)


RUNNERS: dict[str, Callable[[], Runner]] = {
    "demo k8v8": lambda: demo_runner("k8v8"),
    "demo k4v4": lambda: demo_runner("k4v4"),
    "demo dense": lambda: demo_runner("k16v16"),
    "windows": lambda: tiny_runner("gpt_oss"),
    "windows and states": lambda: tiny_runner("baichuan_m1"),
    "states": lambda: tiny_runner("mamba2"),
    "dense at first": lambda: tiny_runner("qwen3", quantized_start=200),
    "bounded": lambda: tiny_runner("qwen3", max_size=200, keep=70),
    "mlx-lm": own_runner,
}


def prompts(seed: int) -> list[list[int]]:
    """Return random prompts, many of which share a beginning."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, 97, length).tolist() for length in (300, 420)]
    shared.append(shared[0][:200] + rng.integers(0, 97, 150).tolist())
    found = []
    for _ in range(7):
        start = shared[rng.integers(len(shared))]
        found.append(start + rng.integers(0, 97, int(rng.integers(1, 150))).tolist())
    return [*found, found[2], shared[0][:1], shared[0][: CHUNK + 1], shared[0][: CHUNK + 1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNERS)
def test_hits_change_no_logits(name: str) -> None:
    runner = RUNNERS[name]()
    asked = prompts(len(name))
    plain = PromptServer(runner, None)
    wanted = [plain.serve(prompt) for prompt in asked]
    biggest = 0
    for cap in (ROOM, None):
        tree = PrefixTree(runner.cache.snapshots, CHUNK, EVERY, cap or TIGHT * biggest)
        server = PromptServer(runner, tree)
        for number, (prompt, (logits, tokens)) in enumerate(zip(asked, wanted, strict=True)):
            got, drawn = server.serve(prompt, stays=number % 3 == 0)
            np.testing.assert_array_equal(got, logits)
            assert drawn == tokens
            biggest = max(biggest, tree.held_bytes // max(1, len(tree)))
            check_tree(tree)
            check_cache(runner.cache)
        assert tree.counts.hit_tokens > 0
        assert (tree.counts.evicted > 0) == (cap is None)
        before = runner.cache.snapshot_charge
        # Rows that stay hold some of the pages.
        assert (tree.freeable_bytes < tree.held_bytes) == (runner.cache.usage.pages_used > 0)
        server.leave()
        assert tree.freeable_bytes == tree.held_bytes
        assert runner.cache.snapshot_charge >= before
        used = runner.cache.usage.used_bytes + runner.cache.snapshots.nbytes
        assert tree.freeable_bytes == used
        tree.clear()
        runner.cache.shrink()
        assert runner.cache.nbytes == runner.cache.snapshot_charge == 0


def test_lowered_checkpoints_are_no_hits_and_are_stored_again() -> None:
    runner = tiny_runner("gpt_oss")
    tree = PrefixTree(runner.cache.snapshots, CHUNK, EVERY, ROOM)
    server = PromptServer(runner, tree)
    prompt = prompts(0)[0]
    logits, _ = server.serve(prompt, stays=True)
    stored = len(tree)
    assert stored >= 2
    lowering = ModelStepDown(runner.cache, server.staying, 1)
    while not lowering.over:
        lowering.advance(0.01, lambda: 0.0)
    hit = tree.match(prompt)

    assert hit.tokens == 0
    assert tree.counts.lowered > 0
    again, _ = server.serve(prompt)
    np.testing.assert_array_equal(again, logits)
    assert tree.match(prompt).tokens == (len(prompt) - 1) // CHUNK * CHUNK
    tree.drop_lowered()
    assert len(tree) == stored
    check_tree(tree)
    check_cache(runner.cache)
