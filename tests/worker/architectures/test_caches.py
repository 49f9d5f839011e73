"""Every architecture gives the same logits over kvd's caches as over mlx-lm's own.

Three sequences run in one batch; one of them joins late, and one leaves early. With dense pages the
logits must equal mlx-lm's own single-sequence runs. With quantized pages they must equal the same
passes over dequantized copies of the pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import probe
from kvd.worker.serving.probe import Served
from kvd.worker.serving.reference import dense_caches
from kvd.worker.serving.runner import Row, Runner
from tests.worker.architectures import table
from tests.worker.architectures.reference import TOKENS, difference, run, tokens
from tests.worker.architectures.zoo import PART, ZOO, build
from tests.worker.cache.invariants import check_cache

pytestmark = pytest.mark.mlx

CHUNK = 64
PROMPTS = (1, 70, 250)
"""The longest exceeds every window and chunk of the models: they have up to 200 tokens."""
STEPS = 9
"""The longest sequence has two pages before the steps. The last step commits its third one."""
JOINS, LEAVES = 2, 4
"""The step at which the longest sequence joins and the shortest leaves."""
CLOSE = 1e-4
SCHEME, CHUNK_SCHEME = "k8v4", "k4v8"
"""Keys and values have different bits, so that mixing them up changes the logits. In one of the two
schemes keys have more bits, in the other one values."""


@dataclass(frozen=True)
class Case:
    """A model, and how the probe serves it."""

    name: str
    model: Any
    served: Served

    def runner(self, scheme: str) -> Runner:
        """Return a runner over pages of this scheme; the probe's own if it uses mlx-lm's caches."""
        cache = self.served.runner.cache
        if not isinstance(cache, ModelCache):
            return self.served.runner
        settings = replace(cache.settings, schemes=(Scheme.parse(scheme),))
        paged = ModelCache(cache.layout, settings, access=cache.access, batched=cache.batched)
        return Runner(self.model, paged)


class Batch:
    """Sequences with given tokens, in a runner's cache."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.ids = [tokens(length + STEPS, seed=length) for length in PROMPTS]
        self.rows: list[Row | None] = [None for _ in PROMPTS]
        self.done = [0 for _ in PROMPTS]

    def join(self, index: int) -> list[tuple[int, mx.array]]:
        """Prefill all but the last token of a prompt; return the start and logits of each chunk."""
        row = self.rows[index] = self.runner.cache.new_row()
        found = []
        end = PROMPTS[index] - 1
        for start in range(0, end, CHUNK):
            chunk = self.ids[index][start : min(start + CHUNK, end)].tolist()
            found.append((start, self.runner.score(row, chunk)))
        self.done[index] = end
        return found

    def leave(self, index: int) -> None:
        self.runner.cache.free(self.rows[index])
        self.rows[index] = None

    def step(self) -> dict[int, mx.array]:
        """Decode one token of every sequence; return the logits by index."""
        active = [index for index, row in enumerate(self.rows) if row is not None]
        rows = [self.rows[index] for index in active]
        if self.runner.cache.needs_flush(rows):
            self.runner.cache.flush()
        inputs = mx.array([self.ids[index][self.done[index]].item() for index in active], mx.int32)
        logits = self.runner.decode(rows, inputs).astype(mx.float32)
        mx.eval(logits, self.runner.cache.arrays())
        for index in active:
            self.done[index] += 1
        return dict(zip(active, logits, strict=True))


def close(got: mx.array, want: mx.array, bound: float = CLOSE) -> None:
    assert mx.isfinite(got).all().item()
    assert difference(got.astype(mx.float32), want.astype(mx.float32)) <= bound


def case_of(name: str) -> Case:
    model, _ = build(name)
    return Case(name, model, probe.serve(model, CacheSettings(scratch=1 << 26), TOKENS))


@pytest.fixture(scope="module", params=PART)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def test_dense_pages_give_the_models_own_logits(case: Case) -> None:
    batch = Batch(case.runner("k16v16"))
    # The reference reads chunks, which is faster than single tokens, unless what a token sees
    # depends on its place in the chunk (`Entry.chunked`).
    decoded = STEPS + 1 if ZOO[case.name].chunked > CLOSE else 0
    expected = [run(case.model, ids, chunk=CHUNK, decoded=decoded) for ids in batch.ids]
    prefilled = {index: batch.join(index) for index in (0, 1)}
    for step in range(STEPS):
        if step == JOINS:
            prefilled[2] = batch.join(2)
        if step == LEAVES:
            batch.leave(0)
        places = list(batch.done)
        for index, logits in batch.step().items():
            close(logits, expected[index][places[index]])
    for index, chunks in prefilled.items():
        for start, logits in chunks:
            close(logits, expected[index][start : start + len(logits)])
    assert batch.done[2] == PROMPTS[2] - 1 + STEPS - JOINS
    check_cache(batch.runner.cache)


def test_quantized_pages_give_the_logits_of_dequantized_copies(case: Case) -> None:
    runner = case.runner(SCHEME)
    cache = runner.cache
    if not isinstance(cache, ModelCache):
        pytest.skip("served dense: nothing is quantized")
    batch = Batch(runner)
    for index in (1, 0):
        batch.join(index)
    for step in range(STEPS):
        if step == JOINS:
            batch.join(2)
        if step == LEAVES:
            batch.leave(0)
        compares = step in {JOINS - 1, JOINS, LEAVES, STEPS - 1}
        states = {
            index: cache.states.state_of(row)
            for index, row in enumerate(batch.rows)
            if row is not None and compares
        }
        places = list(batch.done)
        logits = batch.step()
        for index, state in states.items():
            caches = dense_caches(cache, batch.rows[index], state, without_newest=1)
            token = batch.ids[index][places[index]].reshape(1, 1)
            close(logits[index], case.model(token, cache=caches)[0, -1])
    check_cache(cache)
    if any(not store.kind.bounded for store in cache.stores):
        assert cache.usage.pages_used > 0


def test_chunks_over_quantized_pages_give_the_logits_of_dequantized_copies(case: Case) -> None:
    runner = case.runner(CHUNK_SCHEME)
    cache = runner.cache
    if not isinstance(cache, ModelCache):
        pytest.skip("served dense: nothing is quantized")
    ids = tokens(236)
    row = cache.new_row()
    for start in range(0, 192, CHUNK):
        runner.score(row, ids[start : start + CHUNK].tolist())
    caches = dense_caches(cache, row, cache.states.state_of(row))
    got = runner.score(row, ids[192:].tolist())
    close(got, case.model(ids[None, 192:], cache=caches)[0])


def test_docs_models_has_the_line_of_each_model(case: Case) -> None:
    assert table.line(case.name, case.served) in table.PAGE.read_text().splitlines()


@pytest.mark.parametrize("name", sorted(ZOO.keys() - set(PART)))
def test_docs_models_has_the_line_of_each_other_model(name: str) -> None:
    """The probe compares their logits over kvd's caches with those over mlx-lm's."""
    other = case_of(name)
    assert other.served.error < CLOSE
    assert table.line(name, other.served) in table.PAGE.read_text().splitlines()


NOT_QUANTIZED = {"deepseek_v41": "it has its own cache class, LayerCache"}
"""Models with attention that are served dense, and why: kvd has no store for their caches.

A LayerCache holds a window, token groups that the model itself has compressed, the groups' index
keys, and a group that is not complete.
"""


def test_most_models_use_pages_and_all_with_attention_are_quantized() -> None:
    text = table.PAGE.read_text().partition("## Caches")[2].partition("## Not run here")[0]
    rows = {
        name.strip("` "): (kinds.strip().split(", "), paths.strip().split(", "), why.strip())
        for name, kinds, paths, _, why in (
            line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")
        )
    }
    assert rows.keys() == ZOO.keys()
    assert len(rows) >= 70
    assert sum("pages" in paths for _, paths, _ in rows.values()) >= 55
    dense = {}
    for name, (kinds, paths, why) in rows.items():
        attends = set(kinds) - {"recurrent"}
        assert attends or paths == ["state"], name
        if "dense" in paths:
            dense[name] = why
        elif attends:
            assert set(paths) & {"pages", "dequantize-on-read"}, name
    assert dense == NOT_QUANTIZED


def test_reasons_are_sentences_instead_of_python_errors() -> None:
    text = table.PAGE.read_text().partition("## Caches")[2].partition("## Not run here")[0]
    whys = {line.split("|")[5].strip() for line in text.splitlines() if line.startswith("| `")}
    assert len(whys) > 5
    for why in whys:
        assert not re.search(r"Handle|Error|::|incompatible|\[\w+\]", why), why
